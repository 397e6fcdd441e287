"""What a detokenizer tells of a request: from its opening here to its end here, and how that was."""

from collections.abc import Callable

import msgspec
import pytest

from services.detokenizer.open_requests import OpenRequests
from services.detokenizer.outbox import Outbox
from services.detokenizer.spans import DetokenizerSpans
from shared.ids import InstanceId, RequestId
from shared.messages import Attributes, Outcome, RequestOpened
from shared.telemetry import names
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from tests.detokenizer.bench import SCHEDULER, A, Bench, closed, opened
from tests.detokenizer.vocabularies import Case
from tests.shared.telemetry.spans import CONTEXT


class _Bench(Bench):
    """Open requests whose spans are kept, and a clock of nanoseconds that goes on by one with each look."""

    def __init__(self, case: Case, *, keeps: int = 10, max_open_choices: int = 10) -> None:
        super().__init__(case)
        self.tracing = Tracing(SpanStore(keeps))
        self.now_ns = 0
        self.spans = DetokenizerSpans(self.tracing, self._look)
        self.outbox = Outbox(InstanceId("detokenizer-1"))
        self.requests = OpenRequests(
            case.decoding,
            self.outbox,
            model="m",
            max_open_choices=max_open_choices,
            max_silence_s=60,
            spans=self.spans,
        )

    def _look(self) -> int:
        self.now_ns += 1
        return self.now_ns

    def told(self, request_id: RequestId = A) -> list[tuple[int, int, Attributes]]:
        """Start, end and attributes of each span."""
        kept = self.tracing.store.find(request_id)
        spans = [] if kept is None else kept.spans
        assert all((span.name, span.context) == ("detokenize", CONTEXT) for span in spans)
        return [(span.start_ns, span.end_ns, span.attributes) for span in spans]

    def going_on(self, request_id: RequestId = A) -> int:
        """How many spans of a request are open."""
        (open_spans,) = self.tracing.open_spans
        return sum(span.end_ns == 0 for span in open_spans(request_id))


@pytest.fixture
def bench(case_of: Callable[[str], Case]) -> _Bench:
    return _Bench(case_of("byte level"))


def traced(opening: RequestOpened, **fields: int) -> RequestOpened:
    return msgspec.structs.replace(opening, trace=CONTEXT, **fields)


def attributes(**fields: object) -> dict[str, object]:
    return {names.ATTEMPT: 1, names.REPLAY: 0, names.SCHEDULER: SCHEDULER} | fields


def test_a_request_is_told_of_from_its_opening_to_its_end(bench: _Bench) -> None:
    bench.take([traced(opened(A, num_choices=2))], [bench.entry(A, 0, "the Ġcat")])
    assert (bench.told(), bench.going_on(), bench.going_on(RequestId("req-b"))) == ([], 1, 0)
    bench.take([], [bench.entry(A, 0, "the", index=1)], [closed(A, 2, 1, outcome=Outcome.CANCELLED)])
    expected = attributes() | {names.TEXT_TOKENS: 3, names.OUTCOME: "cancelled"}
    assert bench.told() == [(1, 2, expected)]
    assert bench.going_on() == 0


def test_a_request_that_is_said_again_is_two(bench: _Bench) -> None:
    bench.take([traced(opened(A))], [bench.entry(A, 0, "the")])
    bench.take([traced(opened(A), replay=1, attempt=2)])
    bench.take([], [bench.entry(A, 0, "the Ġcat")], [closed(A, 2, outcome=Outcome.FAILED)])
    first, second = bench.told()
    assert first == (1, 2, attributes() | {names.TEXT_TOKENS: 1, names.OUTCOME: "said_again"})
    assert second[:2] == (3, 4)
    assert (second[2][names.REPLAY], second[2][names.ATTEMPT]) == (1, 2)
    assert second[2][names.TEXT_TOKENS] == 2


def test_what_is_forgotten_is_told_of_as_such(bench: _Bench) -> None:
    bench.take([traced(opened(A))])
    bench.requests.drop_stale(lambda _instance: True, 61.0)
    assert [told[2][names.OUTCOME] for told in bench.told()] == ["forgotten"]


def test_what_is_open_when_a_detokenizer_leaves_is_handed_over(bench: _Bench) -> None:
    bench.take([traced(opened(A))])
    bench.spans.leave()
    assert [told[2] for told in bench.told()] == [attributes() | {names.OUTCOME: "handed_over"}]
    assert bench.going_on() == 0


def test_a_request_that_cannot_go_on_ends_with_its_error(bench: _Bench) -> None:
    bench.take([traced(opened(A))], [bench.entry(A, 0, "the", index=7)])
    ((_, _, said),) = bench.told()
    assert (said[names.OUTCOME], said[names.ERROR_TYPE]) == ("failed", "internal_error")


def test_a_request_that_there_is_no_room_for_has_a_span_too(case_of: Callable[[str], Case]) -> None:
    bench = _Bench(case_of("byte level"), max_open_choices=1)
    bench.take([traced(opened(A, num_choices=2))])
    ((_, _, said),) = bench.told()
    assert (said[names.OUTCOME], said[names.ERROR_TYPE], said[names.TEXT_TOKENS]) == ("failed", "unavailable", 0)


def test_a_request_without_a_context_is_not_told_of(case_of: Callable[[str], Case]) -> None:
    bench = _Bench(case_of("byte level"))
    bench.take([opened(A)], [], [closed(A, 0, outcome=Outcome.CANCELLED)])
    assert bench.told() == []
    nowhere = _Bench(case_of("byte level"), keeps=0)
    nowhere.take([traced(opened(A))])
    assert (nowhere.going_on(), nowhere.now_ns) == (0, 0)
