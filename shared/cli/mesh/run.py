"""One mesh from start to stop: its processes, who of them beats, whether it serves, and the signals that end it."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shared import subjects
from shared.cli.mesh import readiness
from shared.cli.mesh.liveness import Liveness
from shared.cli.mesh.log_files import LogLine
from shared.cli.mesh.plan import MeshOptions, Program, StopOrder
from shared.cli.mesh.report import MeshReporter
from shared.cli.mesh.state import MeshFolder, MeshState
from shared.cli.mesh.supervisor import Supervisor
from shared.cli.mesh.watch import connected, listen
from shared.clock import Clock
from shared.codec import encode
from shared.errors import Disconnected
from shared.ids import InstanceId, Service, new_instance_id
from shared.messages import Presence
from shared.transport import Transport

_POLL_S = 0.1
"""While it is not ready."""
_CHECK_S = 0.5
_UNREACHABLE_AFTER_S = 5.0
"""A NATS server that somebody else runs may come later; but by now a person wants to know what is waited for."""
_SLOW_AFTER_S = 6.0
"""Every process of a second start is up by now."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def _say_farewell(transport: Transport, last: Presence) -> None:
    """Say a last beat for a process that can say nothing any more."""
    beat = replace(last, is_leaving=True, has_died=True)
    with contextlib.suppress(Disconnected):  # then others find out by its silence
        await transport.publish(subjects.presence(beat.service), encode(beat))


class MeshRun:
    """A mesh of this machine while it runs."""

    def __init__(
        self,
        options: MeshOptions,
        programs: Sequence[Program],
        folder: MeshFolder,
        *,
        reporter: MeshReporter,
        clock: Clock,
    ) -> None:
        """Raises OSError if the log files cannot be written."""
        self._options = options
        self._folder = folder
        self._reporter = reporter
        self._clock = clock
        self._liveness = Liveness(clock)
        self._service_names = [program.name for program in programs if program.stop_order is not StopOrder.BROKER]
        self._names = [program.name for program in programs]
        self._stop = asyncio.Event()
        self._started: dict[str, float] = {}
        self._ids: dict[str, InstanceId] = {}
        """Of the present life of each service."""
        self._transport: Transport | None = None
        self._farewells: set[asyncio.Task[None]] = set()
        self.supervisor = Supervisor(
            programs,
            folder=folder.logs,
            reporter=self,
            clock=clock,
            drain_deadline_s=options.drain_deadline_s,
            environ_of_life=self._environ_of_life,
        )

    async def run(self) -> None:
        """Serve until a signal says stop. Raises as `Supervisor.run` does."""
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        began = self._clock.now()
        self._started = dict.fromkeys(self._names, began)
        self._folder.write(self._state())
        if metrics_ports := self._options.metrics_ports:
            self._folder.write_targets({name: f"127.0.0.1:{port}" for name, port in metrics_ports.items()})
        self._reporter.starting(self._names, self._options.model)
        watching = [asyncio.create_task(self._watch_beats()), asyncio.create_task(self._watch_readiness(began))]
        for task in watching:
            task.add_done_callback(lambda _task: self._stop.set())  # it only ever ends by a bug, or because we stop
        try:
            await self.supervisor.run(self._stop)
        finally:
            for task in (*watching, *self._farewells):
                task.cancel()
            outcomes = await asyncio.gather(*watching, *self._farewells, return_exceptions=True)
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    # What the supervisor tells.

    def line(self, name: str, line: LogLine, raw: str) -> None:
        """A process wrote a line."""
        self._reporter.line(name, line, raw)

    def died(self, name: str, how: str, delay_s: float) -> None:
        """A process died: its next life has to beat anew. Others hear of it now, and need not miss its beats first."""
        last = self._liveness.forget(name)
        if last is not None and self._transport is not None:
            farewell = asyncio.create_task(_say_farewell(self._transport, last))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)
        self._started[name] = self._clock.now()
        self._reporter.died(name, how, delay_s)

    def stopping(self, names: Sequence[str]) -> None:
        """These were told to stop now."""
        self._reporter.stopping(names)

    def killed(self, name: str, *, was_asked: bool) -> None:
        """A process was killed."""
        self._reporter.killed(name, was_asked=was_asked)

    def _state(self) -> MeshState:
        options = self._options
        first, *others = (readiness.address(options.host, port) for port in options.ports)
        return MeshState(first, options.port, options.nats_url, options.model, os.getpid(), tuple(others))

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self.supervisor.hurry()
        else:
            self._reporter.stop()
            self._stop.set()

    def _environ_of_life(self, name: str) -> Mapping[str, str]:
        """What tells this life of a service from all others, in this mesh and elsewhere."""
        if name not in self._service_names:
            return {}
        self._ids[name] = new_instance_id(Service(name.rpartition("-")[0]))
        return {"SHOAL_INSTANCE_ID": self._ids[name]}

    def _on_beat(self, beat: Presence) -> None:
        if self._ids.get(beat.name) != beat.instance_id:
            return  # of an earlier life, or of a namesake on another machine
        if self._liveness.observe(beat) and beat.name in self._started:
            self._reporter.up(beat.name, self._clock.now() - self._started[beat.name], self._waiting_for())

    def _waiting_for(self) -> list[str]:
        return [name for name in self._service_names if not self._liveness.has_heard(name)]

    async def _watch_beats(self) -> None:
        reminding = asyncio.create_task(self._remind_of_nats())
        try:
            async with connected(self._options.nats_url) as transport:
                reminding.cancel()
                self._transport = transport
                await listen(transport, self._on_beat)
                await self._end_the_hung(transport)
        finally:
            reminding.cancel()

    async def _end_the_hung(self, transport: Transport) -> None:
        while not await self._stopped_within(_CHECK_S):
            for name in self._liveness.hung(is_connected=transport.is_connected):
                if name in self._service_names:
                    self._reporter.hung(name)
                    self.supervisor.kill(name)

    async def _remind_of_nats(self) -> None:
        """An embedded server that does not come up is told of by the supervisor."""
        if len(self._names) == len(self._service_names) and not await self._stopped_within(_UNREACHABLE_AFTER_S):
            self._reporter.unreachable(self._options.nats_url, _UNREACHABLE_AFTER_S)

    async def _watch_readiness(self, began: float) -> None:
        """Tell when the mesh serves, and when it does so again after it did not."""
        is_ready = is_slow = was_ever_ready = False
        pause_s = 0.0
        while not await self._stopped_within(pause_s):
            answers = await self._ask_gateways()
            was_ready = is_ready
            of_each = [answer is not None and answer.is_ready for answer in answers]
            is_ready = any(of_each) if was_ever_ready else all(of_each)
            now = self._clock.now()
            if is_ready and not was_ready:
                self._reporter.ready(self._state(), now - began)
            elif was_ready and not is_ready:
                began = now
                self._reporter.unready(next((answer.missing for answer in answers if answer), ("gateway",)))
            elif not was_ever_ready and not is_slow and now - began > _SLOW_AFTER_S:
                is_slow = True
                self._reporter.slow(self._waiting_for())
            was_ever_ready |= is_ready
            pause_s = _CHECK_S if is_ready else _POLL_S

    async def _ask_gateways(self) -> Sequence[readiness.Readiness | None]:
        """What each of them says."""
        options = self._options
        return await asyncio.gather(*(readiness.ask(options.host, port, options.model) for port in options.ports))

    async def _stopped_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)
        return self._stop.is_set()
