"""What the mesh says of itself, by its beats, as `shoal status` shows it: who is busy, and whether anything is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from shared.cli.mesh.view import InstanceRow, MeshView
from shared.cli.mesh.watch import connected, listen
from shared.clock import SystemClock
from shared.ids import Service
from shared.messages import DetokenizerStatus, ExecutorStatus, GatewayStatus, SchedulerStatus, TokenizerStatus
from shared.transport import Transport
from tests.chaos.mesh import NUM_EACH
from tests.chaos.workload import MODEL

_LOOK_S: Final = 0.1


class Beats:
    """The beats heard so far."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.view = MeshView(SystemClock())

    async def listen(self) -> None:
        """Hear them, and notice who falls silent."""
        await listen(self.transport, self.view.observe)

    async def tick_for_ever(self) -> None:
        """Let those go who are silent; not while nobody can be heard."""
        while True:
            await asyncio.sleep(_LOOK_S)
            if self.transport.is_connected:
                self.view.tick()

    def up(self) -> list[InstanceRow]:
        """The instances that live."""
        return [row for row in self.view.snapshot().instances if row.state == "up"]

    def busiest(self, service: Service) -> str | None:
        """The name of the instance of a service that has most to do, if any lives."""
        rows = [row for row in self.up() if row.service is service]
        return max(rows, key=_load).name if rows else None

    def is_whole(self) -> bool:
        """Whether every instance is up and a request would be served."""
        return not self._lacking()

    def leftovers(self) -> list[str]:
        """What there is that a mesh without requests has not, or lacks that a whole one has."""
        return self._lacking() + [f"{row.name}: {what}" for row in self.up() for what in _left_in(row)]

    def _lacking(self) -> list[str]:
        rows = self.up()
        lacking = [
            f"{service}: {count} of {NUM_EACH} are up"
            for service in Service
            if (count := sum(row.service is service for row in rows)) != NUM_EACH
        ]
        if missing := self.view.snapshot().missing.get(MODEL, ("everything",)):
            lacking.append(f"requests would not be served: {', '.join(missing)}")
        return lacking

    async def until_clean(self, within_s: float) -> list[str]:
        """What is still left over when the time is over; nothing as soon as nothing is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.leftovers():  # noqa: ASYNC110  # beats are looked at together
                    await asyncio.sleep(_LOOK_S)
        return self.leftovers()


@contextlib.asynccontextmanager
async def hearing(nats_url: str) -> AsyncIterator[Beats]:
    """Beats from now on."""
    async with connected(nats_url) as transport:
        beats = Beats(transport)
        await beats.listen()
        ticking = asyncio.create_task(beats.tick_for_ever(), name="ticks")
        try:
            yield beats
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)


def _load(row: InstanceRow) -> float:
    match row.status:
        case GatewayStatus(num_open_requests=num_open):
            return num_open
        case SchedulerStatus(executors=executors, num_waiting=num_waiting, num_running=num_running):
            return 1000 * len(executors) + num_waiting + num_running  # beats may be older than the requests
        case DetokenizerStatus(num_open_choices=num_open):
            return num_open
        case ExecutorStatus(num_steps=num_steps):
            return num_steps
        case TokenizerStatus(num_requests=num_requests):
            return num_requests
        case _:
            return 0


def _left_in(row: InstanceRow) -> list[str]:
    match row.status:
        case GatewayStatus(num_open_requests=num_open) if num_open:
            return [f"{num_open} requests are open"]
        case DetokenizerStatus(num_open_choices=num_open) if num_open:
            return [f"{num_open} choices are open"]
        case ExecutorStatus(held_by=None):
            return ["no scheduler holds it"]
        case SchedulerStatus() as status:
            left = [f"{count} choices {what}" for count, what in _queues(status) if count]
            left += [
                f"{view.num_blocks - view.num_free_blocks} blocks of {view.executor_id} are not free"
                for view in status.executors
                if view.num_free_blocks != view.num_blocks
            ]
            return left
        case _:
            return []


def _queues(status: SchedulerStatus) -> list[tuple[int, str]]:
    return [(status.num_waiting, "wait"), (status.num_running, "run")]
