"""Instruments: what is recorded is what a snapshot shows, and stays so."""

from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.telemetry.metrics import OTHER, Histogram, HistogramPoint, Kind, Reading, Tally, snapshot

BOUNDS = (0.1, 1.0, 10.0)


def make_histogram(*labels: str) -> Histogram:
    return Histogram("test.duration", "s", "For tests", BOUNDS, labels)


def point(histogram: Histogram, *labels: str) -> HistogramPoint:
    return histogram.points()[labels]


@pytest.mark.parametrize(("value", "bucket"), [(-1, 0), (0.1, 0), (0.10001, 1), (1.0, 1), (10, 2), (10.1, 3), (1e9, 3)])
def test_a_bound_belongs_to_the_bucket_below_it(value: float, bucket: int) -> None:
    histogram = make_histogram()
    histogram.record(value)
    assert point(histogram).counts == tuple(int(number == bucket) for number in range(4))


@given(st.lists(st.floats(min_value=-100, max_value=100)))
def test_every_value_is_counted_once_in_its_bucket(values: list[float]) -> None:
    histogram = make_histogram()
    for value in values:
        histogram.record(value)
    if not values:
        assert histogram.points() == {}
        return
    counts = Counter(bisect_left(BOUNDS, value) for value in values)
    assert point(histogram).counts == tuple(counts[bucket] for bucket in range(4))
    assert point(histogram).count == len(values)
    assert point(histogram).total == pytest.approx(sum(values))
    assert (point(histogram).lowest, point(histogram).highest) == (min(values), max(values))


def test_each_combination_of_labels_has_buckets_of_its_own() -> None:
    histogram = make_histogram("model", "kind")
    histogram.record(0.5, "tiny", "a")
    histogram.record(0.5, "tiny", "b")
    histogram.record(5, "tiny", "b")
    assert point(histogram, "tiny", "a").counts == (0, 1, 0, 0)
    assert point(histogram, "tiny", "b").counts == (0, 1, 1, 0)


def test_a_value_without_its_labels_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="model"):
        make_histogram("model").record(1)


def test_too_many_labels_end_up_in_one_series() -> None:
    histogram = make_histogram("tenant")
    for number in range(1000):
        histogram.record(1, str(number))
    assert len(histogram.points()) <= 257
    assert sum(each.count for each in histogram.points().values()) == 1000
    assert point(histogram, OTHER).count > 700


def test_a_tally_counts_what_has_a_series_there_and_the_rest_together() -> None:
    tally = Tally(max_series=2)
    for tenant in ("a", "b", "c", "a", "d"):
        tally.add(10, tenant, "output")
    assert tally.counts == {("a", "output"): 20, ("b", "output"): 10, (OTHER, OTHER): 20}


def test_a_reading_is_read_when_a_snapshot_is_taken() -> None:
    numbers = {"waiting": 1}
    reading = Reading("test.queue", Kind.SUM, "{request}", "For tests", lambda: dict(numbers), ("state",))
    before = snapshot([reading])
    numbers["waiting"] = 5
    assert before[0].points == {("waiting",): 1}
    assert snapshot([reading])[0].points == {("waiting",): 5}


def test_a_snapshot_does_not_change_with_what_comes_after_it() -> None:
    histogram, tally = make_histogram(), Tally()
    reading = Reading("test.count", Kind.COUNTER, "1", "For tests", lambda: tally.counts, ("a",))
    histogram.record(1)
    tally.add(1, "x")
    taken = snapshot([histogram, reading])
    histogram.record(1)
    tally.add(1, "x")
    first, second = (family.points for family in taken)
    assert [each.count for each in first.values() if isinstance(each, HistogramPoint)] == [1]
    assert second == {("x",): 1}


def test_what_has_no_number_yet_is_not_in_a_snapshot() -> None:
    empty = Reading("test.empty", Kind.GAUGE, "1", "For tests", dict, ("a",))
    zero = Reading("test.zero", Kind.GAUGE, "1", "For tests", lambda: 0)
    assert [family.instrument.name for family in snapshot([make_histogram(), empty, zero])] == ["test.zero"]
