"""Metrics as plain numbers: what a service counts, and what it is called. Owns no format and no time.

Two kinds of instrument. A `Reading` is a number that a service keeps anyway; it is read when somebody asks and costs
nothing in between. A `Histogram` is told of each value; that takes a third of a microsecond. Neither needs a package
beside Python, so recording is the same whether or not anybody can export it.

Everything here belongs to the event loop's thread: values are recorded there, and `snapshot` is taken there. What a
snapshot holds is no longer changed, so it may be rendered in any thread.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

Labels = tuple[str, ...]
"""The values of an instrument's labels, in their order."""

Numbers = float | Mapping[str, float] | Mapping[Labels, float]
"""One number of an instrument without labels, or one for each value of its label, or of its labels."""

OTHER: Final = "_other"
"""Stands for the labels that came after there were too many different ones."""

_MAX_SERIES: Final = 256


class Kind(Enum):
    """How numbers of a reading may be put together."""

    COUNTER = auto()
    """Only grows; instances and labels add up."""
    SUM = auto()
    """Goes up and down; instances and labels add up."""
    GAUGE = auto()
    """Goes up and down; adding it up means nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that is read when somebody asks."""

    name: str
    """With dots, as in OpenTelemetry."""
    kind: Kind
    unit: str
    """In UCUM: `s`, `By`, `1`, or an annotation such as `{request}`."""
    help: str
    read: Callable[[], Numbers]
    labels: Labels = ()


class _Series:
    """The entries of a histogram that have the same labels."""

    __slots__ = ("counts", "highest", "lowest", "total")

    def __init__(self, num_buckets: int) -> None:
        self.counts = [0] * num_buckets
        self.total = 0.0
        self.lowest = float("inf")
        self.highest = -float("inf")


class Histogram:
    """How values are distributed over buckets, for each combination of labels."""

    __slots__ = ("_series", "bounds", "help", "labels", "name", "unit")

    def __init__(self, name: str, unit: str, help: str, bounds: Sequence[float], labels: Labels = ()) -> None:  # noqa: A002
        """`bounds` are the upper bounds of the buckets, each belonging to its bucket, in growing order; one more bucket
        takes what is above them all."""
        self.name = name
        self.unit = unit
        self.help = help
        self.bounds = tuple(bounds)
        self.labels = labels
        self._series: dict[Labels, _Series] = {}

    def record(self, value: float, *labels: str) -> None:
        """Count one value."""
        series = self._series.get(labels) or self._open(labels)
        series.counts[bisect_left(self.bounds, value)] += 1
        series.total += value
        if value < series.lowest:
            series.lowest = value
        if value > series.highest:
            series.highest = value

    def points(self) -> dict[Labels, "HistogramPoint"]:
        """What was counted until now."""
        return {
            labels: HistogramPoint(tuple(series.counts), series.total, series.lowest, series.highest)
            for labels, series in self._series.items()
        }

    def _open(self, labels: Labels) -> _Series:
        if len(labels) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not {labels}")
        if len(self._series) >= _MAX_SERIES:
            labels = (OTHER,) * len(labels)
        return self._series.setdefault(labels, _Series(len(self.bounds) + 1))


class Tally:
    """Counts by labels, of which there is a bound: what comes with yet another one is counted as `_other`."""

    def __init__(self, max_series: int = _MAX_SERIES) -> None:
        self.counts: dict[Labels, float] = {}
        self._max_series = max_series

    def add(self, amount: float, *labels: str) -> None:
        """Count so much more."""
        if labels not in self.counts and len(self.counts) >= self._max_series:
            labels = (OTHER,) * len(labels)
        self.counts[labels] = self.counts.get(labels, 0) + amount


class Names:
    """Bounds what a label can be: the first so many names stand for themselves, all later ones are `_other`."""

    def __init__(self, max_names: int) -> None:
        self._names: set[str] = set()
        self._max_names = max_names

    def of(self, name: str) -> str:
        """The label for a name."""
        if name not in self._names:
            if len(self._names) >= self._max_names:
                return OTHER
            self._names.add(name)
        return name


Instrument = Reading | Histogram


@dataclass(frozen=True, slots=True)
class HistogramPoint:
    """What one combination of labels has counted."""

    counts: tuple[int, ...]
    """One for each bound, and one for what is above."""
    total: float
    lowest: float
    highest: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Family:
    """One instrument with its numbers of one moment."""

    instrument: Instrument
    points: Mapping[Labels, float | HistogramPoint]


Snapshot = tuple[Family, ...]
"""All instruments of a process that have a number."""


class MetricsPage(Protocol):
    """Where all metrics of a process can be had as text."""

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page of this moment and its content type: the one that `accept`, an HTTP header, likes best."""
        ...


def snapshot(instruments: Iterable[Instrument]) -> Snapshot:
    """The numbers of this moment; those without any are left out. Call it in the event loop's thread."""
    families = (Family(instrument, _points(instrument)) for instrument in instruments)
    return tuple(family for family in families if family.points)


def _points(instrument: Instrument) -> Mapping[Labels, float | HistogramPoint]:
    if isinstance(instrument, Histogram):
        return instrument.points()
    numbers = instrument.read()
    if isinstance(numbers, Mapping):
        return {(labels,) if isinstance(labels, str) else labels: +number for labels, number in numbers.items()}
    return {(): +numbers}  # a claim becomes 0 or 1
