"""What is kept of ended requests, and the gateways that are lost: bounded in time and in memory."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.orphans import Orphans
from services.scheduler.retention import Retention
from services.scheduler.streams import EndedStream, Stream
from shared.ids import InstanceId, RequestId
from shared.messages import (
    Outcome,
    RequestClosed,
    RequestOpened,
    ResumedChoice,
    TextOptions,
    TokenLogprobs,
    Usage,
)
from tests.scheduler.driver import make_request
from tests.scheduler.harness import GATEWAY, SCHEDULER, submission


def ended(name: str, *, num_tokens: int = 10, ended_at: float = 0.0, num_logprobs: int = 0) -> EndedStream:
    logprobs = (TokenLogprobs(-1.0, array("i", range(num_logprobs)), (-1.0,) * num_logprobs),) * num_tokens
    log = ResumedChoice(array("i", range(num_tokens)), None, logprobs if num_logprobs else ())
    request_id = RequestId(name)
    opened = RequestOpened(request_id, SCHEDULER, GATEWAY, "model", TextOptions(), 1)
    closed = RequestClosed(request_id, Outcome.COMPLETED, Usage(11, 0, (num_tokens,)))
    return EndedStream(submission(name), opened, (log,), closed, ended_at, None)


def open_stream(name: str, gateway_id: InstanceId = GATEWAY, *, client: bytes = b"chat") -> Stream:
    opened = RequestOpened(RequestId(name), SCHEDULER, gateway_id, "model", TextOptions(), 1)
    return Stream(make_request(name, [1]), submission(name, client=client), opened, 0.0)


def test_an_ended_request_is_kept_for_its_time() -> None:
    retention = Retention(300.0, 1_000_000)
    retention.add(ended("a", ended_at=10.0))
    retention.add(ended("b", ended_at=20.0))
    retention.expire(309.0)
    assert len(retention) == 2
    retention.expire(310.0)
    assert (retention.get(RequestId("a")), len(retention)) == (None, 1)
    assert retention.get(RequestId("b")) is not None


def test_the_oldest_give_way_when_there_are_too_many_tokens() -> None:
    retention = Retention(300.0, 10_000)
    for number in range(10):
        retention.add(ended(f"r{number}", num_tokens=1489))
    assert [stream.request_id for stream in retention] == ["r5", "r6", "r7", "r8", "r9"], "2000 tokens each"


def test_one_that_is_larger_than_everything_is_not_kept() -> None:
    retention = Retention(300.0, 1000)
    retention.add(ended("small"))
    retention.add(ended("large", num_tokens=2000))
    assert len(retention) == 0
    retention.add(ended("another"))
    assert len(retention) == 1


def test_log_probabilities_weigh_more_than_tokens() -> None:
    retention = Retention(300.0, 30_000)
    retention.add(ended("plain", num_tokens=100))
    retention.add(ended("with", num_tokens=100, num_logprobs=20))
    assert [stream.request_id for stream in retention] == ["plain", "with"]
    retention.add(ended("too many", num_tokens=100, num_logprobs=20))
    assert [stream.request_id for stream in retention] == ["too many"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3000)), max_size=40))
def test_the_weight_is_that_of_what_is_kept(arrivals: list[tuple[str, int]]) -> None:
    """The same request may end again, in a later attempt."""
    retention = Retention(300.0, 8_000)
    for name, num_tokens in arrivals:
        retention.add(ended(name, num_tokens=num_tokens))
        alone = Retention(300.0, 1 << 40)
        for stream in retention:
            alone.add(stream)
        assert retention._num_tokens == alone._num_tokens <= 8_000
    for name in "abcdef":
        retention.discard(RequestId(name))
    assert (retention._num_tokens, len(retention)) == (0, 0)


def test_an_orphan_is_given_up_after_its_grace() -> None:
    orphans, streams = Orphans(30.0), [open_stream("r")]
    orphans.lost(GATEWAY, 100.0)
    assert orphans.to_give_up(streams, 129.0) == []
    assert orphans.num_streams == 1
    orphans.lost(GATEWAY, 120.0)  # it does not die twice
    assert orphans.to_give_up(streams, 130.0) == streams


def test_a_gateway_that_only_slept_has_its_requests_back() -> None:
    orphans, streams = Orphans(30.0), [open_stream("r")]
    orphans.lost(GATEWAY, 100.0)
    orphans.found(GATEWAY)
    assert orphans.to_give_up(streams, 200.0) == []
    assert (orphans.num_streams, orphans.has(GATEWAY)) == (0, False)


def test_what_cannot_be_resumed_is_given_up_at_once_and_others_gateways_requests_never() -> None:
    orphans = Orphans(30.0)
    plain, foreign = open_stream("plain", client=b""), open_stream("foreign", InstanceId("gateway-2"))
    orphans.lost(GATEWAY, 100.0)
    assert orphans.to_give_up([plain, foreign, open_stream("r")], 100.0) == [plain]


def test_a_submission_that_arrives_after_its_gateway_is_lost_is_an_orphan_too() -> None:
    orphans = Orphans(0.0)
    orphans.lost(GATEWAY, 100.0)
    assert orphans.to_give_up([], 110.0) == []
    late = [open_stream("r")]
    assert orphans.to_give_up(late, 111.0) == late
    orphans.to_give_up([], 161.0)
    assert not orphans.has(GATEWAY), "lost gateways are not remembered for ever"
