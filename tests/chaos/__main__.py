"""Chaos for as long as asked: `make chaos ARGS="--minutes 10"`. Streams run, and processes die, at random; with
--compose containers do, of the mesh in compose.yaml.

Waves of streams follow one another; in each, services and the broker are hit at random moments, one after the other:
the next when the mesh is whole again, or at any time with --overlap. Then whole logs may die with everybody who had
them, so that a stream may end with an error; that counts as lost, and is never silent.
Every stream is compared with an undisturbed run of the same request. The exit status is 1 if anything was lost, doubled
or left behind. A seed gives the same blows again, though not at the same instants.

With --soak nothing is hit, or with --kills a process a minute, and memory is watched: the exit status is 1 also if a
process takes ever more of it.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.ids import Service
from tests.chaos.beats import Beats
from tests.chaos.containers import ContainerMesh
from tests.chaos.faults import BROKER_BLOWS, Blow, Fault, every_fault, strike
from tests.chaos.mesh import ChaosMesh
from tests.chaos.model_home import make_home
from tests.chaos.progress import Progress, Record
from tests.chaos.protocol import Mesh
from tests.chaos.runs import Run, run_disturbed, run_with_fault, undisturbed_run
from tests.chaos.soak import SETTINGS as SOAK_SETTINGS
from tests.chaos.soak import soak
from tests.chaos.workload import StreamSpec, make_streams
from tests.compose.docker import why_not

_MAX_BLOWS = 3
"""In one wave."""


@dataclass(slots=True)
class Totals:
    """What all waves together came to."""

    num_streams: int = 0
    num_resumed: int = 0
    worst_pause_s: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    num_lost: int = 0
    num_bad_waves: int = 0
    num_doubtful_waves: int = 0
    num_problems: int = 0

    def add(self, run: Run) -> None:
        """Count one more wave."""
        if run.is_in_doubt:
            self.num_doubtful_waves += 1
            return
        self.num_streams += len(run.records)
        self.num_resumed += run.num_resumed
        self.worst_pause_s = max(self.worst_pause_s, run.worst_pause_s)
        self.num_lost += run.num_lost
        self.num_problems += len(run.problems)
        self.num_bad_waves += bool(run.problems)

    def show(self) -> str:
        """The report's last lines."""
        blows = ", ".join(f"{name} {count}" for name, count in sorted(self.blows.items()))
        return (
            f"{self.num_streams} streams, {self.blows.total()} blows ({blows})\n"
            f"{self.num_resumed} times a client came back for the rest of a stream; "
            f"the worst pause in the middle of one was {self.worst_pause_s:.1f} s\n"
            f"{self.num_lost} streams were lost; {self.num_problems} problems in {self.num_bad_waves} waves"
            + (f"; {self.num_doubtful_waves} waves say nothing" if self.num_doubtful_waves else "")
        )


class RandomBlows:
    """Disturbs a wave a few times, whenever a random share of its text has come."""

    def __init__(self, draw: random.Random, totals: Totals, *, overlap: bool) -> None:
        self._draw = draw
        self._totals = totals
        self._overlap = overlap

    async def __call__(self, mesh: Mesh, beats: Beats, progress: Progress) -> None:
        """Strike while there is something to disturb."""
        async with asyncio.TaskGroup() as tasks:
            for share in sorted(self._draw.uniform(0, 0.9) for _ in range(self._draw.randint(1, _MAX_BLOWS))):
                await progress.until_share(share)
                if progress.is_over:
                    return
                service = self._draw.choice([*Service, None])
                blow = self._draw.choice(BROKER_BLOWS if service is None else list(Blow))
                striking = tasks.create_task(self._strike(mesh, beats, service, blow))
                if not self._overlap:
                    await striking
                    await _until_whole(beats, progress)

    async def _strike(self, mesh: Mesh, beats: Beats, service: Service | None, blow: Blow) -> None:
        name = await strike(mesh, beats, service, blow)
        self._totals.blows[f"{service or 'broker'} {blow}"] += 1
        print(f"    {blow} {name}", flush=True)


async def _until_whole(beats: Beats, progress: Progress) -> None:
    while not (beats.is_whole() or progress.is_over):  # noqa: ASYNC110  # beats are looked at together
        await asyncio.sleep(0.1)


def _say(number: int, what: str, run: Run) -> None:
    verdict = "right" if not run.problems else f"{len(run.problems)} PROBLEMS"
    if run.is_in_doubt:
        verdict = f"IN DOUBT, the machine stood still for {run.stood_still_s:.1f} s"
    pause = f"worst pause {run.worst_pause_s:.1f} s, resumed {run.num_resumed} times"
    print(f"{number:4} {what}: {verdict}, {pause}", *filter(None, [run.report()]), sep="\n", flush=True)


async def _random_waves(
    mesh: Mesh,
    specs: Sequence[StreamSpec],
    undisturbed: Sequence[Record],
    *,
    minutes: float,
    seed: int,
    overlap: bool,
) -> Totals:
    totals, draw = Totals(), random.Random(seed)
    until, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < until:
        number += 1
        run = await run_disturbed(mesh, specs, undisturbed, RandomBlows(draw, totals, overlap=overlap))
        totals.add(run)
        _say(number, "wave", run)
    return totals


async def _each_fault(
    mesh: Mesh, specs: Sequence[StreamSpec], undisturbed: Sequence[Record], faults: Sequence[Fault]
) -> Totals:
    totals = Totals()
    for number, fault in enumerate(faults, start=1):
        run = await run_with_fault(mesh, specs, undisturbed, fault)
        totals.blows[f"{fault.service or 'broker'} {fault.blow}"] += 1
        totals.add(run)
        _say(number, str(fault), run)
    return totals


async def _run(options: argparse.Namespace, mesh: Mesh) -> Totals:
    specs = make_streams(options.seed, options.streams, num_gateways=len(mesh.urls))
    undisturbed = await undisturbed_run(mesh, specs)
    if options.matrix:
        faults = [fault for fault in every_fault() if options.only in str(fault)]
        return await _each_fault(mesh, specs, undisturbed, faults)
    return await _random_waves(
        mesh, specs, undisturbed, minutes=options.minutes, seed=options.seed, overlap=options.overlap
    )


def _soak(options: argparse.Namespace, mesh: ChaosMesh) -> bool:
    """Whether nothing was wrong; says what."""
    soaked = asyncio.run(
        soak(mesh, minutes=options.soak, seed=options.seed, num_streams=options.streams, kills=options.kills)
    )
    print(soaked.show())
    return soaked.is_good


def _disturb(options: argparse.Namespace, mesh: Mesh) -> bool:
    """Whether nothing was wrong; says what."""
    totals = asyncio.run(_run(options, mesh))
    print(totals.show())
    return totals.num_problems == 0


def main() -> int:
    """Run what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=5, help="how long to go on with random blows")
    parser.add_argument("--overlap", action="store_true", help="strike again before the mesh is whole")
    parser.add_argument("--matrix", action="store_true", help="instead: every service, blow and moment, in turn")
    parser.add_argument(
        "--only", default="", help="of the matrix, what has this in its name, such as scheduler-SIGKILL"
    )
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="instead: no blows, and memory is watched")
    parser.add_argument("--kills", action="store_true", help="with --soak: kill a process every minute")
    parser.add_argument("--streams", type=int, default=32, help="in each wave")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--logs", type=Path, help="keep the logs of all processes in this folder")
    parser.add_argument(
        "--compose", action="store_true", help="strike containers, clients behind the front; the images must be there"
    )
    options = parser.parse_args()
    if options.kills and options.soak is None:
        parser.error("--kills goes with --soak")
    if options.compose and options.soak is not None:
        parser.error("--soak watches processes, not containers")
    if options.compose and (reason := why_not()) is not None:
        print(f"chaos in containers was NOT tried: {reason}")
        return 1
    logging.getLogger().addHandler(logging.NullHandler())  # that the broker is away is no news here
    with tempfile.TemporaryDirectory(prefix="shoal-chaos-") as temporary:
        logs = options.logs or Path(temporary) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        home = make_home(Path(temporary) / "home")
        mesh: ChaosMesh | ContainerMesh
        if options.compose:
            mesh = ContainerMesh(logs, home)
        else:
            mesh = ChaosMesh(logs, home, {} if options.soak is None else SOAK_SETTINGS)
        try:
            mesh.start()
            if options.soak is not None and isinstance(mesh, ChaosMesh):
                is_good = _soak(options, mesh)
            else:
                is_good = _disturb(options, mesh)
        finally:
            mesh.stop()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
