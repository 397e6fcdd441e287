"""One run: many streams through the mesh, a fault perhaps, and the verdict on all of it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from tests.chaos import accounts
from tests.chaos.beats import Beats, hearing
from tests.chaos.endpoints import Turns, new_session
from tests.chaos.faults import Fault, strike, strike_all
from tests.chaos.history import Connected, Ending, Piece, broken_rules, differences
from tests.chaos.http_client import HttpClient
from tests.chaos.progress import Progress, Record
from tests.chaos.protocol import Mesh
from tests.chaos.stalls import TOO_LONG_S, watching_for_stalls
from tests.chaos.websocket_client import SocketClient
from tests.chaos.workload import Protocol, StreamSpec

STREAMS_WITHIN_S: Final = 60.0
CLEAN_WITHIN_S: Final = 45.0
"""A killed executor is there again after some seconds, and what has no client is kept for a while."""
READY_WITHIN_S: Final = 120.0
_STREAMS_PER_SOCKET: Final = 4
_MAX_SHOWN: Final = 12

Disturb = Callable[[Mesh, Beats, Progress], Coroutine[None, None, None]]


@dataclass(slots=True)
class Run:
    """What came of one run."""

    records: Sequence[Record]
    problems: list[str] = field(default_factory=list)
    stood_still_s: float = 0.0
    """How long the clients themselves, and the machine perhaps, stood still in between."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether what went wrong may be the machine's fault: then the run says nothing, and has to be repeated."""
        return bool(self.problems) and self.stood_still_s > TOO_LONG_S

    def report(self) -> str:
        """The problems, as many as one reads: the first ones whole, of the others how many."""
        rest = len(self.problems) - _MAX_SHOWN
        return "\n".join([*self.problems[:_MAX_SHOWN], *([f"and {rest} more"] if rest > 0 else [])])

    @property
    def num_lost(self) -> int:
        """Streams that did not come to the end that they would have had."""
        ends = [next((event for event in record.events if isinstance(event, Ending)), None) for record in self.records]
        return sum(end is None or end.kind != "completed" for end in ends)

    @property
    def num_resumed(self) -> int:
        """How often a stream went on over another connection."""
        return sum(record.num_resumed for record in self.records)

    @property
    def worst_pause_s(self) -> float:
        """The longest silence in the middle of a stream."""
        return max((record.worst_pause_s for record in self.records), default=0.0)


def num_chars(records: Sequence[Record]) -> int:
    """All text of a run."""
    return sum(len(event.text) for record in records for event in record.events if isinstance(event, Piece))


@contextlib.asynccontextmanager
async def watched(mesh: Mesh) -> AsyncIterator[Beats]:
    """A mesh that is whole, supervised and listened to."""
    async with mesh.supervised(), hearing(mesh.nats_url) as beats:
        left = await beats.until_clean(READY_WITHIN_S)
        assert not left, f"the mesh is not whole to begin with: {left}; {mesh.died}"
        yield beats


async def undisturbed_run(mesh: Mesh, specs: Sequence[StreamSpec]) -> Sequence[Record]:
    """What the streams say when nothing happens to them."""
    async with watched(mesh) as beats:
        run = await _run(mesh, beats, specs, None, None)
    assert not run.problems, run.report()
    return run.records


async def run_with_fault(mesh: Mesh, specs: Sequence[StreamSpec], undisturbed: Sequence[Record], fault: Fault) -> Run:
    """The same streams, and a fault at its moment."""

    async def disturb(mesh: Mesh, beats: Beats, progress: Progress) -> None:
        await progress.until(fault.moment)
        if fault.hits_all and fault.service is not None:
            await strike_all(mesh, fault.service, fault.blow)
        else:
            await strike(mesh, beats, fault.service, fault.blow)

    return await run_disturbed(mesh, specs, undisturbed, disturb)


async def run_disturbed(
    mesh: Mesh, specs: Sequence[StreamSpec], undisturbed: Sequence[Record], disturb: Disturb
) -> Run:
    """The same streams, and whatever `disturb` does meanwhile."""
    async with watched(mesh) as beats, watching_for_stalls() as watch:
        run = await _run(mesh, beats, specs, undisturbed, disturb)
        run.stood_still_s = watch.worst_s
        return run


async def run_wave(mesh: Mesh, beats: Beats, specs: Sequence[StreamSpec], disturb: Disturb | None = None) -> Run:
    """Streams that are like no others, on a mesh that is watched already."""
    return await _run(mesh, beats, specs, None, disturb)


async def _run(
    mesh: Mesh,
    beats: Beats,
    specs: Sequence[StreamSpec],
    undisturbed: Sequence[Record] | None,
    disturb: Disturb | None,
) -> Run:
    began = accounts.now()
    progress = Progress(len(specs), num_chars(undisturbed) if undisturbed else None)
    run = Run([Record(spec.name, spec.num_choices) for spec in specs])
    async with new_session() as session, asyncio.TaskGroup() as tasks:
        disturbing = tasks.create_task(disturb(mesh, beats, progress)) if disturb is not None else None
        try:
            async with asyncio.timeout(STREAMS_WITHIN_S), asyncio.TaskGroup() as streaming:
                for client in _clients(session, mesh.urls, specs, run.records, progress):
                    streaming.create_task(client.run())
        except TimeoutError:
            run.problems.append(f"{len(specs) - progress.num_ended} streams had no end after {STREAMS_WITHIN_S:g} s")
            if disturbing is not None:
                disturbing.cancel()
    run.problems += progress.problems + judge(specs, run.records, undisturbed)
    run.problems += await accounts.wrong_accounts(beats.transport, run.records, began)
    left = await beats.until_clean(CLEAN_WITHIN_S)
    run.problems += [f"left over: {what}" for what in left]
    if left:
        await asyncio.to_thread(mesh.renew)  # the next run is not to be judged by what this one left
        await beats.until_clean(READY_WITHIN_S)
    run.problems += mesh.died
    mesh.died.clear()
    return run


def judge(specs: Sequence[StreamSpec], records: Sequence[Record], undisturbed: Sequence[Record] | None) -> list[str]:
    """What is wrong with the streams, each by itself and beside its undisturbed twin."""
    problems: list[str] = []
    for number, (spec, record) in enumerate(zip(specs, records, strict=True)):
        found = broken_rules(record.events, spec.num_choices)
        if undisturbed is not None and record.is_over:
            found += differences(record.events, undisturbed[number].events, spec.num_choices)
        problems += [f"{spec.name} ({_story(spec, record)}): {what}" for what in found]
    return problems


def _story(spec: StreamSpec, record: Record) -> str:
    """How a stream went, for whoever looks for what went wrong."""
    connections = [event for event in record.events if isinstance(event, Connected)]
    ways = [f"{each.gateway} after {each.why}" if each.why else each.gateway for each in connections]
    return f"{spec.protocol.name}, {', '.join(record.request_ids) or 'never accepted'}, via {'; '.join(ways)}"


def _clients(
    session: aiohttp.ClientSession,
    urls: Sequence[str],
    specs: Sequence[StreamSpec],
    records: Sequence[Record],
    progress: Progress,
) -> list[SocketClient | HttpClient]:
    """A connection for each stream over HTTP; those over WebSockets share some."""
    pairs = list(zip(specs, records, strict=True))
    clients: list[SocketClient | HttpClient] = [
        HttpClient(session, Turns(urls, spec.gateway), spec, record, progress)
        for spec, record in pairs
        if spec.protocol is Protocol.HTTP
    ]
    for gateway in range(len(urls)):
        own = [(s, r) for s, r in pairs if s.protocol is Protocol.WEBSOCKET and s.gateway == gateway]
        for start in range(0, len(own), _STREAMS_PER_SOCKET):
            batch = own[start : start + _STREAMS_PER_SOCKET]
            turns = Turns(urls, gateway)
            clients.append(SocketClient(session, turns, [s for s, _ in batch], [r for _, r in batch], progress))
    return clients
