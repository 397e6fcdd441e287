"""What the gateway writes down of a request: what was delivered, once, if the mesh ever took it."""

import pytest

from services.gateway.open_request import OpenRequest
from services.gateway.streams import End, Stream
from services.gateway.usage import UsageRecords
from shared.errors import Stalled
from shared.ids import InstanceId, RequestId
from shared.messages import ChoiceText, ErrorInfo, FinishReason, Outcome, Usage, UsageRecord, int32s
from tests.shared.messages.examples import SUBMISSION

REQUEST, GATEWAY = RequestId("req-1"), InstanceId("gateway-1")
NOW = 1_700_000_000.5


def text(index: int, *token_ids: int) -> ChoiceText:
    return ChoiceText(REQUEST, index, 0, int32s(token_ids), 0, "x" * len(token_ids))


def recorded(stream: Stream, end: End, num_tokens_at_adoption: tuple[int, ...] = ()) -> list[UsageRecord]:
    written: list[UsageRecord] = []
    records = UsageRecords(GATEWAY, written.append, lambda: NOW)
    request = OpenRequest(stream, SUBMISSION, InstanceId("scheduler-1"), 0.0, 0.0)
    request.num_prompt_tokens = 7
    request.num_tokens_at_adoption = num_tokens_at_adoption
    records.ended(request, end)
    return written


@pytest.fixture
def stream() -> Stream:
    stream = Stream(REQUEST, 2)
    stream.accept()
    stream.append(text(0, 5, 6, 7))
    stream.append(text(1, 8))
    return stream


def test_a_completed_request_is_recorded_with_what_the_mesh_said(stream: Stream) -> None:
    end = End(Outcome.COMPLETED, Usage(10, 4, (3, 1)))
    assert recorded(stream, end) == [
        UsageRecord(REQUEST, "acme", "tiny", Outcome.COMPLETED, Usage(10, 4, (3, 1)), NOW, GATEWAY)
    ]


def test_a_request_that_ended_without_the_mesh_is_recorded_with_what_was_delivered(stream: Stream) -> None:
    end = End(Outcome.FAILED, error=ErrorInfo.of(Stalled("silence")))
    (record,) = recorded(stream, end)
    assert (record.outcome, record.error_code, record.usage) == (Outcome.FAILED, "stalled", Usage(7, 0, (3, 1)))


def test_tokens_that_were_computed_and_never_delivered_do_not_count(stream: Stream) -> None:
    (record,) = recorded(stream, End(Outcome.CANCELLED, Usage(10, 4, (9, 9))))
    assert record.usage == Usage(10, 4, (3, 1))


def test_tokens_that_were_said_twice_count_once(stream: Stream) -> None:
    stream.append(text(0, 5, 6, 7))
    stream.append(ChoiceText(REQUEST, 0, 1, int32s([6, 7, 9]), 1, "xxy", FinishReason.LENGTH))
    (record,) = recorded(stream, End(Outcome.COMPLETED, Usage(10, 4, (4, 1))))
    assert record.usage.num_output_tokens == (4, 1)


def test_a_request_that_nobody_took_is_not_recorded() -> None:
    stream = Stream(REQUEST, 1)
    assert recorded(stream, End(Outcome.FAILED, error=ErrorInfo.of(Stalled("nobody")))) == []
    assert recorded(stream, End(Outcome.CANCELLED)) == []


def test_a_request_whose_acceptance_was_lost_is_recorded() -> None:
    stream = Stream(REQUEST, 1)
    (record,) = recorded(stream, End(Outcome.CANCELLED, Usage(10, 0, (0,))))
    assert record.usage == Usage(10, 0, (0,))


def test_what_another_gateway_had_delivered_before_counts_although_it_is_not_here_yet(stream: Stream) -> None:
    (record,) = recorded(stream, End(Outcome.CANCELLED, Usage(10, 4, (9, 9))), num_tokens_at_adoption=(2, 5))
    assert record.usage.num_output_tokens == (3, 5)


def test_tokens_after_a_stop_string_do_not_count_however_many_there_were(stream: Stream) -> None:
    for index, start in ((0, 3), (1, 1)):
        stream.append(ChoiceText(REQUEST, index, start, int32s(), start, "", FinishReason.STOP))
    (record,) = recorded(stream, End(Outcome.COMPLETED, Usage(10, 4, (3, 1))), num_tokens_at_adoption=(7, 7))
    assert record.usage.num_output_tokens == (3, 1)
