"""The table of open requests under anything that mesh, client and clock can do, in any order."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.accounts import account_of
from services.gateway.config import GatewayConfig
from services.gateway.handover import Choose, Handover, IsServed
from services.gateway.metrics import GatewayMetrics
from services.gateway.requests import OpenRequests
from services.gateway.streams import End, Reader, Stream
from services.gateway.submissions import Outgoing
from shared import subjects
from shared.codec import Decoder
from shared.errors import InvalidRequest, RequestError, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import (
    CancelRequest,
    ChoiceText,
    ErrorInfo,
    FinishReason,
    Outcome,
    ReplayRequest,
    RequestAccepted,
    RequestClosed,
    RequestPast,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    SubmitRequest,
    TextProduced,
    TextPrompt,
    Usage,
    int32s,
)
from shared.sampling import SamplingParams

GATEWAY, SCHEDULER = InstanceId("gateway-1"), InstanceId("scheduler-1")
SCHEDULERS = (SCHEDULER, InstanceId("scheduler-2"))
DETOKENIZERS = (InstanceId("detokenizer-1"), InstanceId("detokenizer-2"))
CONFIG = GatewayConfig()
SUBMISSION: Outgoing = ("tokenize", b"the request")
IDS = [RequestId(f"req-{number}") for number in range(4)]
TIMEOUTS_MS = {IDS[0]: 500, IDS[1]: 4000}
"""The others take as long as they take."""


def submit(request_id: RequestId, timeout_ms: int | None = None) -> SubmitRequest:
    return SubmitRequest(
        request_id=request_id,
        gateway_id=GATEWAY,
        scheduler_id=SCHEDULER,
        model="m",
        tenant="t",
        prompt=TextPrompt("a"),
        sampling=SamplingParams(seed=0),
        timeout_ms=timeout_ms,
    )


def new_table(
    choose: Choose = lambda _model: None,
    config: GatewayConfig = CONFIG,
    is_served: IsServed = lambda _model: True,
    **told: Any,
) -> OpenRequests:
    return OpenRequests(GATEWAY, config, Handover(GATEWAY, choose, is_served), **told)


def failure_of(stream: Stream) -> tuple[int, str] | None:
    end: End | None = stream.end
    return (end.error.status, end.error.code) if end is not None and end.error is not None else None


class Life(RuleBasedStateMachine):
    """A few requests, and everything that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.schedulers = [SCHEDULER]
        self.metrics = GatewayMetrics()
        self.is_served = True
        self.table = new_table(
            lambda _model: self.schedulers[0] if self.schedulers else None,
            is_served=lambda _model: self.is_served,
            on_end=lambda request, end: self.metrics.request_ended(account_of(request, end, self.now)),
            on_first_token=lambda request: self.metrics.first_token(request, "chat", self.now),
        )
        self.waiting = {IDS[3]}
        """Those for which there was no scheduler, and that were not submitted yet."""
        self.attempts: dict[RequestId, int] = dict.fromkeys(IDS, 1)
        """The latest that was submitted."""
        self.homes: dict[RequestId, InstanceId] = dict.fromkeys(IDS, SCHEDULER)
        """Where it was submitted."""
        self.lost: set[tuple[RequestId, int]] = set()
        """Attempts whose scheduler was silent, or did not know them."""
        self.streams: dict[RequestId, Stream] = {}
        self.ends: dict[RequestId, int] = {}
        self.cancellations: dict[RequestId, int] = {}
        self.num_tokens: dict[RequestId, int] = {}

    @initialize()
    def open_all(self) -> None:
        for request_id in IDS:
            submission = None if request_id in self.waiting else SUBMISSION
            stream = self.table.open(submit(request_id, TIMEOUTS_MS.get(request_id)), submission, self.now)
            self.streams[request_id] = stream
            self.ends[request_id] = self.cancellations[request_id] = self.num_tokens[request_id] = 0
            Reader([stream], self._counter(request_id), wants_text=False)

    def _counter(self, request_id: RequestId) -> Any:
        def count() -> None:
            self.ends[request_id] += self.streams[request_id].end is not None

        return count

    def _sent(self, outgoing: list[Outgoing]) -> None:
        for subject, payload in outgoing:
            if (subject, payload) == SUBMISSION:
                continue
            if subject == subjects.tokenize("m"):
                self._submitted(Decoder[SubmitRequest](SubmitRequest).decode(payload))
                continue
            assert subject in map(subjects.inbox, SCHEDULERS)
            message = Decoder[CancelRequest | ReplayRequest](CancelRequest | ReplayRequest).decode(payload)
            if isinstance(message, CancelRequest) and message.goes_on:
                self._dismissed(message)
            elif isinstance(message, CancelRequest):
                self.cancellations[message.request_id] += 1
            else:
                assert subject == subjects.inbox(self.homes[message.request_id]), "only who has it is asked"
                assert message.attempt == self.attempts[message.request_id]

    def _dismissed(self, message: CancelRequest) -> None:
        """A scheduler may forget what it keeps: another one has it, or nobody needs it, or it was given up as lost."""
        request = self.table._requests.get(message.request_id)
        was_lost = (message.request_id, message.attempt) in self.lost
        assert request is None or (request.attempt > message.attempt and (request.is_taken or was_lost))

    def _submitted(self, message: SubmitRequest) -> None:
        """A later attempt, or the same one again: with all the output that is here, to a scheduler that is there."""
        request_id, stream = message.request_id, self.streams[message.request_id]
        assert stream.end is None, "what has ended for the client is not started again"
        if request_id in self.waiting:
            self.waiting.discard(request_id)
            self.homes[request_id] = message.scheduler_id
        if message.attempt == self.attempts[request_id]:
            assert message.scheduler_id == self.homes[request_id]
            return
        assert message.attempt == self.attempts[request_id] + 1
        assert message.scheduler_id in self.schedulers
        self.attempts[request_id], self.homes[request_id] = message.attempt, message.scheduler_id
        known = [list(choice.token_ids) for choice in message.resumed] or [[]]
        assert known == [list(choice.token_ids) for choice in stream.choices]

    @rule(request_id=st.sampled_from(IDS), is_late=st.booleans())
    def accept(self, request_id: RequestId, is_late: bool) -> None:
        attempt = self.attempts[request_id] - is_late
        self.table.accepted(RequestAccepted(request_id, self.homes[request_id], 3, attempt), self.now)

    @rule(request_id=st.sampled_from(IDS), error=st.sampled_from([InvalidRequest("no"), Unavailable("not now")]))
    def refuse(self, request_id: RequestId, error: RequestError) -> None:
        if request_id in self.waiting:
            return
        refused = RequestRefused(request_id, ErrorInfo.of(error), self.attempts[request_id])
        self._sent(self.table.refused(refused, self.now))

    @rule(request_id=st.sampled_from(IDS), is_late=st.booleans())
    def deny(self, request_id: RequestId, is_late: bool) -> None:
        attempt = self.attempts[request_id] - is_late
        self.lost.add((request_id, attempt))
        self._sent(self.table.unknown(RequestUnknown(request_id, self.homes[request_id], attempt), self.now))

    @rule(request_id=st.sampled_from(IDS), is_late=st.booleans())
    def release(self, request_id: RequestId, is_late: bool) -> None:
        attempt = self.attempts[request_id] - is_late
        self._sent(
            self.table.released(RequestReleased(request_id, self.homes[request_id], attempt, RequestPast()), self.now)
        )

    @rule(request_id=st.sampled_from(IDS))
    def detach(self, request_id: RequestId) -> None:
        self._sent(self.table.detach(self.streams[request_id], self.now))

    @rule(request_id=st.sampled_from(IDS))
    def attach(self, request_id: RequestId) -> None:
        self.table.attach(self.streams[request_id])

    @rule(request_id=st.sampled_from(IDS), skipped=st.sampled_from([0, 0, 0, 1]), by=st.sampled_from(DETOKENIZERS))
    def say(self, request_id: RequestId, skipped: int, by: InstanceId) -> None:
        first = self.num_tokens[request_id] + skipped
        self.num_tokens[request_id] = first + 1
        piece = ChoiceText(request_id, 0, first, int32s([1]), first, "x", attempt=self.attempts[request_id])
        self._sent(self.table.text_produced(TextProduced(by, texts=(piece,)), self.now))

    @rule(
        request_id=st.sampled_from(IDS),
        outcome=st.sampled_from(Outcome),
        finishes=st.booleans(),
        is_late=st.sampled_from([False, False, True]),
    )
    def close(self, request_id: RequestId, outcome: Outcome, finishes: bool, is_late: bool) -> None:
        count, attempt = self.num_tokens[request_id], self.attempts[request_id] - is_late
        num_before = self.ends[request_id]
        last = ChoiceText(request_id, 0, count, int32s(), count, "", FinishReason.STOP, attempt=attempt)
        closed = RequestClosed(request_id, outcome, Usage(3, 0, (count,)), attempt=attempt)
        texts = (last,) if finishes else ()
        self._sent(self.table.text_produced(TextProduced(DETOKENIZERS[0], texts=texts, closed=(closed,)), self.now))
        assert not is_late or self.ends[request_id] == num_before, "the end of an earlier attempt is no end"

    @rule(request_id=st.sampled_from(IDS))
    def cancel(self, request_id: RequestId) -> None:
        self._sent(self.table.cancel(self.streams[request_id], self.now))

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0, 130.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._sent(self.table.tick(self.now))
        for request_id, timeout_ms in TIMEOUTS_MS.items():
            is_over = self.now >= timeout_ms / 1000 + 1.0
            wants_more = request_id in self.table._requests and self.table._requests[request_id].cancelled_at is None
            assert not (is_over and wants_more), "nobody waits longer than a request's own time and a second"
        for request in self.table._requests.values():
            if request.waits_since is not None and request.cancelled_at is None:
                assert self.now - request.waits_since < CONFIG.placement_timeout_s, "nor long for somebody to take it"
                assert not request.stream.is_accepted

    @rule(which=st.sampled_from(SCHEDULERS))
    def lose_scheduler(self, which: InstanceId) -> None:
        self.schedulers = [scheduler for scheduler in self.schedulers if scheduler != which]
        self.lost |= {(each, self.attempts[each]) for each, home in self.homes.items() if home == which}
        self._sent(self.table.scheduler_lost(which, self.now))

    @rule(which=st.sampled_from(SCHEDULERS))
    def find_scheduler(self, which: InstanceId) -> None:
        self.schedulers = list(dict.fromkeys([*self.schedulers, which]))
        self._sent(self.table.scheduler_found(which, self.now))

    @rule(which=st.sampled_from(DETOKENIZERS), is_last=st.booleans())
    def lose_detokenizer(self, which: InstanceId, is_last: bool) -> None:
        self.table.detokenizer_lost(which, ["m"] if is_last else [], self.now)

    @rule()
    def change_hope(self) -> None:
        self.is_served = not self.is_served

    @rule()
    def find_detokenizer(self) -> None:
        self.table.detokenizer_found(["m"])

    @precondition(lambda self: self.now > 100)
    @rule()
    def leave(self) -> None:
        self._sent(self.table.end_all(Unavailable("bye"), self.now))

    @invariant()
    def ends_at_most_once(self) -> None:
        assert all(count <= 1 for count in self.ends.values())
        assert sum(self.table.num_ended.values()) == sum(self.ends.values())

    @invariant()
    def metrics_count_each_end_and_each_first_token_once(self) -> None:
        assert sum(self.metrics.ended.counts.values()) == sum(self.ends.values())
        of_requests, of_first_tokens, *_ = self.metrics.histograms
        with_tokens = sum(any(choice.token_ids for choice in stream.choices) for stream in self.streams.values())
        assert sum(point.count for point in of_requests.points().values()) == sum(self.ends.values())
        assert sum(point.count for point in of_first_tokens.points().values()) == with_tokens
        assert all(point.lowest >= 0 for each in self.metrics.histograms for point in each.points().values())

    @invariant()
    def errors_belong_to_failures(self) -> None:
        for stream in self.streams.values():
            if stream.end is not None:
                assert (stream.end.error is not None) == (stream.end.outcome is Outcome.FAILED)

    @invariant()
    def what_ended_here_alone_is_being_cancelled(self) -> None:
        for request_id, request in self.table._requests.items():
            if request.stream.end is not None:
                assert request.cancelled_at is not None
                assert self.cancellations[request_id] >= 1

    @invariant()
    def who_has_a_request_is_there(self) -> None:
        for request in self.table._requests.values():
            if request.cancelled_at is None and request.scheduler_id is not None:
                assert request.scheduler_id in self.schedulers

    def teardown(self) -> None:
        """In the end, with nobody saying anything, everything ends and nothing is kept."""
        for _ in range(100):
            self.now += 30.0
            self._sent(self.table.tick(self.now))
        assert len(self.table) == 0
        assert all(count == 1 for count in self.ends.values())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(1, 6))
def test_request_is_sent_so_often_and_then_failed(max_submissions: int) -> None:
    table = new_table(config=GatewayConfig(max_submissions=max_submissions))
    stream = table.open(submit(IDS[0]), SUBMISSION, 0.0)
    sent = table.submission(IDS[0])
    now = 0.0
    while stream.end is None:
        now += 0.5
        sent += table.tick(now)
    assert sent.count(SUBMISSION) == max_submissions
    assert now == 2.0 * max_submissions
    assert failure_of(stream) == (503, "unavailable")


@given(st.integers(1, 6000), st.booleans())
def test_time_that_is_over_ends_a_request_that_the_mesh_does_not_end(timeout_ms: int, is_accepted: bool) -> None:
    table = new_table()
    stream = table.open(submit(IDS[0], timeout_ms), SUBMISSION, 10.0)
    if is_accepted:
        table.accepted(RequestAccepted(IDS[0], SCHEDULER, 3), 10.0)
    over = 10.0 + timeout_ms / 1000 + 1.0
    table.tick(over - 0.001)
    assert stream.end is None, "its scheduler is given a second to say so itself"
    (cancellation,) = table.tick(over)
    assert failure_of(stream) == (504, "deadline_exceeded")
    assert cancellation[0] == subjects.inbox(SCHEDULER)
    late = RequestClosed(IDS[0], Outcome.FAILED, Usage(3, 0, (0,)), error=ErrorInfo.of(Unavailable("late")))
    table.text_produced(TextProduced(DETOKENIZERS[0], closed=(late,)), over)
    assert failure_of(stream) == (504, "deadline_exceeded")
    assert len(table) == 0


def test_cancelled_request_is_not_sent_again() -> None:
    table = new_table()
    stream = table.open(submit(IDS[0]), SUBMISSION, 0.0)
    assert len(table.cancel(stream, 0.0)) == 1
    assert table.cancel(stream, 0.0) == []
    assert table.submission(IDS[0]) == []
    assert SUBMISSION not in [message for second in range(1, 10) for message in table.tick(float(second))]
    assert len(table) == 0
