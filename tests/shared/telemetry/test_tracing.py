"""Who is followed: everybody while spans are kept, those that are sampled while they are exported, else nobody."""

import pytest

from shared.messages import Span
from shared.telemetry.metrics import snapshot
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing, new_span_id, new_trace_id
from tests.shared.telemetry.spans import CONTEXT, UNSAMPLED, request_id, span_of


class _Exporter:
    def __init__(self) -> None:
        self.num_dropped = 0
        self.spans: list[Span] = []
        self.closed_within_s: float | None = None

    def offer(self, span: Span) -> None:
        self.spans.append(span)

    def close(self, within_s: float) -> None:
        self.closed_within_s = within_s


def test_spans_that_do_not_arrive_can_be_counted_from_outside() -> None:
    exporter = _Exporter()
    exporter.num_dropped = 3
    (family,) = snapshot(Tracing(exporter=exporter).instruments())
    assert (family.instrument.name, family.points) == ("shoal.spans.dropped", {(): 3})
    (family,) = snapshot(Tracing().instruments())
    assert family.points == {(): 0}, "where nothing is exported, too: alerts want a number"


def test_where_nothing_is_kept_nor_exported_nobody_is_followed() -> None:
    tracing = Tracing(sample_ratio=1.0)
    assert not tracing.is_on
    assert tracing.begin(None) is tracing.begin(CONTEXT) is None
    assert not tracing.follows(CONTEXT)


@pytest.mark.parametrize(
    ("keeps", "exports", "of_sampled", "of_others"),
    [(True, False, True, True), (False, True, True, False), (True, True, True, True), (False, False, False, False)],
)
def test_everybody_is_followed_who_is_kept_or_exported(
    keeps: bool, exports: bool, of_sampled: bool, of_others: bool
) -> None:
    tracing = Tracing(SpanStore(10 if keeps else 0), _Exporter() if exports else None)
    assert (tracing.follows(CONTEXT), tracing.follows(UNSAMPLED)) == (of_sampled, of_others)
    assert not tracing.follows(None)


def test_all_are_kept_and_only_those_that_are_sampled_are_exported() -> None:
    exporter = _Exporter()
    tracing = Tracing(SpanStore(10), exporter)
    sampled, other = span_of(1), span_of(2, context=UNSAMPLED)
    tracing.record(sampled, "acme")
    tracing.record(other)
    assert exporter.spans == [sampled]
    for number, span, owner in ((1, sampled, "acme"), (2, other, None)):
        kept = tracing.store.find(request_id(number))
        assert kept is not None
        assert (kept.spans, kept.owner) == ([span], owner)


def test_a_clients_trace_goes_on_with_its_own_decision() -> None:
    for ratio in (0.0, 1.0):
        tracing = Tracing(SpanStore(10), sample_ratio=ratio)
        assert tracing.begin(CONTEXT) is CONTEXT
        assert tracing.begin(UNSAMPLED) is UNSAMPLED


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_so_large_a_share_of_new_traces_is_sampled(ratio: float) -> None:
    tracing = Tracing(SpanStore(10), sample_ratio=ratio)
    contexts = [tracing.begin(None) for _ in range(4000)]
    share = sum(context is not None and context.is_sampled for context in contexts) / len(contexts)
    assert share == pytest.approx(ratio, abs=0.05 if 0 < ratio < 1 else 0)  # seven standard deviations
    assert len({context.trace_id for context in contexts if context is not None}) == len(contexts)


def test_all_processes_decide_alike_of_a_trace() -> None:
    """By its id alone: the last eight bytes of it, as a number, are below the ratio of all there are."""
    tracing = Tracing(SpanStore(10), sample_ratio=0.5)
    for _ in range(100):
        context = tracing.begin(None)
        assert context is not None
        assert context.is_sampled is (context.trace_id[8] < 0x80)


def test_ids_are_of_the_right_length_and_not_nothing() -> None:
    assert {len(new_span_id()) for _ in range(100)} == {8}
    assert {len(new_trace_id()) for _ in range(100)} == {16}
    assert len({new_span_id() for _ in range(1000)}) == 1000


def test_closing_gives_the_exporter_its_time() -> None:
    exporter = _Exporter()
    Tracing(exporter=exporter).close(0.5)
    assert exporter.closed_within_s == 0.5
