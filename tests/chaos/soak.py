"""A soak: streams of every kind for a long time, with nothing in their way or a kill a minute, and memory watched.

Waves of new streams follow one another. Each must keep the rules of streams, be recorded once, and leave nothing: every
block free, no entry left anywhere. What that cannot see, memory that only grows, `memory` judges at the end.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

import psutil

from shared.ids import Service
from tests.chaos.beats import Beats
from tests.chaos.faults import Blow, strike
from tests.chaos.memory import MemoryLog, Sample
from tests.chaos.mesh import ChaosMesh
from tests.chaos.progress import Moment, Progress
from tests.chaos.protocol import Mesh
from tests.chaos.runs import run_wave, watched
from tests.chaos.workload import make_streams

SETTINGS: Final = {"SHOAL_TRACE_STORE_REQUESTS": "50", "SHOAL_SCHEDULER_RETAIN_S": "20"}
"""What is kept of the latest requests is full within the first minute, not after five or more."""
SAMPLE_INTERVAL_S: Final = 2.0
KILL_INTERVAL_S: Final = 60.0


@dataclass(slots=True)
class Soaked:
    """What came of it."""

    memory: MemoryLog = field(default_factory=MemoryLog)
    num_waves: int = 0
    num_streams: int = 0
    killed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def show(self) -> str:
        """The report."""
        rate = self.num_streams / self.seconds * 60 if self.seconds else 0.0
        verdict = [*self.problems, *self.memory.growing()]
        lines = [
            f"{self.num_streams} streams in {self.num_waves} waves, {rate:.0f} a minute"
            + (f"; killed: {', '.join(self.killed)}" if self.killed else ""),
            self.memory.show(),
            *(verdict or ["memory is flat, and nothing is left"]),
        ]
        return "\n".join(lines)

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems and not self.memory.growing()


class _Kills:
    """Kills a process every minute, in the middle of a wave."""

    def __init__(self, draw: random.Random, soaked: Soaked) -> None:
        self._draw = draw
        self._soaked = soaked
        self._due_at = time.monotonic() + KILL_INTERVAL_S

    async def __call__(self, mesh: Mesh, beats: Beats, progress: Progress) -> None:
        if time.monotonic() < self._due_at:
            return
        self._due_at += KILL_INTERVAL_S
        await progress.until(Moment.PREFILL)
        self._soaked.killed.append(await strike(mesh, beats, self._draw.choice(list(Service)), Blow.KILL))


async def soak(mesh: ChaosMesh, *, minutes: float, seed: int, num_streams: int, kills: bool) -> Soaked:
    """Keep streams going for so long."""
    soaked, draw = Soaked(), random.Random(seed)
    disturb = _Kills(draw, soaked) if kills else None
    async with watched(mesh) as beats, _sampled(mesh, soaked.memory):
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            run = await run_wave(mesh, beats, make_streams(draw.getrandbits(32), num_streams), disturb)
            soaked.num_waves += 1
            soaked.num_streams += len(run.records)
            if run.problems:
                soaked.problems += [f"wave {soaked.num_waves}: {problem}" for problem in run.problems]
                print(f"wave {soaked.num_waves}: {run.report()}", flush=True)
        soaked.seconds = time.monotonic() - began
    return soaked


@contextlib.asynccontextmanager
async def _sampled(mesh: ChaosMesh, memory: MemoryLog) -> AsyncIterator[None]:
    sampling = asyncio.create_task(_sample_for_ever(mesh, memory), name="memory samples")
    try:
        yield
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)


async def _sample_for_ever(mesh: ChaosMesh, memory: MemoryLog) -> None:
    while True:
        for instance in mesh.instances:
            with contextlib.suppress(psutil.Error):  # it is dying at this moment
                if instance.is_running and instance.process_id is not None:
                    num_bytes = psutil.Process(instance.process_id).memory_info().rss
                    memory.add(instance.name, instance.process_id, Sample(time.monotonic(), num_bytes))
        await asyncio.sleep(SAMPLE_INTERVAL_S)
