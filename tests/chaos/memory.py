"""Whether processes take ever more memory: samples of what is resident, and the verdict on them.

The rule: of each life of a process the first three minutes and the first half do not count, since caches, pools and
what is kept of the latest requests fill up then, and the heap takes its shape: a scheduler was seen to grow for 80 to
180 seconds, the longer the busier the machine. Over the rest, the slope must stay below 1 MiB a minute. A soak makes
400 requests or more a minute, so that is 2.5 KiB for each: about the smallest thing that a request leaves behind which
is forgotten in some table, its prompt and its log. Healthy processes were seen to grow by up to 0.3 MiB a minute, in
steps of the allocator and for ids that are remembered by the thousand; the slope is the median over all pairs of
samples, which a single large step hardly moves.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

MIB: Final = 1 << 20
MAX_SLOPE_MIB_PER_MINUTE: Final = 1.0
WARM_UP_S: Final = 180.0
MIN_JUDGED_S: Final = 50.0
"""Below it the noise of allocators is as steep as a leak."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process took at one moment."""

    at_s: float
    num_bytes: int


@dataclass(slots=True)
class Life:
    """One process from its first sample to its last one."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    def judged(self) -> Sequence[Sample]:
        """The samples that count; none if they cover too little time."""
        began, ended = self.samples[0].at_s, self.samples[-1].at_s
        since = max(began + WARM_UP_S, (began + ended) / 2)
        return [sample for sample in self.samples if sample.at_s >= since] if ended - since >= MIN_JUDGED_S else []

    def slope(self) -> float | None:
        """MiB a minute, or None if it was too short to say."""
        judged = self.judged()
        return slope(judged) if judged else None


class MemoryLog:
    """The samples of all processes; each life of an instance by itself."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], Life] = {}

    def add(self, name: str, process_id: int, sample: Sample) -> None:
        """Take in one more sample of the process that is an instance at this moment."""
        self._lives.setdefault((name, process_id), Life(name)).samples.append(sample)

    def lives(self) -> dict[str, list[Life]]:
        """The lives of each instance, one after the other."""
        lives: dict[str, list[Life]] = defaultdict(list)
        for life in self._lives.values():
            lives[life.name].append(life)
        return dict(lives)

    def growing(self) -> list[str]:
        """What is wrong: lives that take ever more, and services none of whose processes lived long enough to say."""
        wrong = []
        judged: dict[str, int] = defaultdict(int)
        for name, lives in self.lives().items():
            slopes = [slope for life in lives if (slope := life.slope()) is not None]
            judged[name.rpartition("-")[0]] += len(slopes)
            wrong += [
                f"{name} takes {slope:.2f} MiB more every minute, which is not below {MAX_SLOPE_MIB_PER_MINUTE:g}"
                for slope in slopes
                if slope >= MAX_SLOPE_MIB_PER_MINUTE
            ]
        too_short = [service for service, num_judged in judged.items() if num_judged == 0]
        return wrong + [f"no {service} lived long enough to say whether its memory grows" for service in too_short]

    def show(self) -> str:
        """A line for each instance: what its latest life took at first, in the middle and at last, and the slope."""
        return "\n".join(_line(lives[-1], len(lives)) for lives in self.lives().values())


def slope(samples: Sequence[Sample]) -> float:
    """The median of the slopes between all pairs, in MiB a minute. Needs two samples at different times."""
    slopes = [
        (second.num_bytes - first.num_bytes) / (second.at_s - first.at_s)
        for first, second in combinations(samples, 2)
        if second.at_s > first.at_s
    ]
    return statistics.median(slopes) * 60 / MIB


def _line(life: Life, num_lives: int) -> str:
    samples = life.samples
    first, middle, last = (samples[place].num_bytes / MIB for place in (0, len(samples) // 2, -1))
    trend = "too short to say" if (steepness := life.slope()) is None else f"{steepness:+.2f} MiB a minute"
    again = f", life {num_lives}" if num_lives > 1 else ""
    return f"{life.name:16} {first:7.1f} → {middle:7.1f} → {last:7.1f} MiB  {trend}{again}"
