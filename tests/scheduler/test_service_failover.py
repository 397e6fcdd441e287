"""The scheduler service: requests that come from elsewhere, are said again, or have lost their gateway."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from shared import attempts, subjects
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AdoptRequest,
    CancelRequest,
    DetachExecutor,
    FindRequest,
    FinishReason,
    Message,
    Outcome,
    Presence,
    ReplayLog,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestFound,
    RequestMoved,
    RequestPast,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    ResumedChoice,
    RunStep,
    SchedulerStatus,
    StopStringFound,
    int32s,
)
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import (
    DETOKENIZER,
    GATEWAY,
    PROMPT,
    SCHEDULER,
    DetokenizerPeer,
    GatewayPeer,
    Mesh,
)

R = RequestId("r")
OTHER = InstanceId("gateway-2")
OTHER_SCHEDULER = InstanceId("scheduler-2")
RESUMABLE: dict[str, Any] = {"client": b"chat", "owner": "me"}


def output(index: int = 0, num_tokens: int = 5) -> list[int]:
    return undisturbed_output(PROMPT, 0, index, num_tokens)


def find(owner: str = "me", request_id: str = "r", gateway_id: InstanceId = OTHER) -> FindRequest:
    return FindRequest("query", RequestId(request_id), owner, gateway_id)


def adopt(attempt: int = 1, gateway_id: InstanceId = OTHER) -> AdoptRequest:
    return AdoptRequest("query", R, "me", gateway_id, attempt, attempts.after_adoption(attempt, gateway_id))


ADOPTED = attempts.after_adoption(1, OTHER)
"""As which the other gateway adopts the first attempt."""


async def ask_all(mesh: Mesh, message: Message) -> None:
    """Ask all schedulers, as gateways do."""
    await mesh.gateway.transport.publish(subjects.ADOPTIONS, encode(message))
    await mesh.settle()


async def tell(mesh: Mesh, message: Message) -> None:
    await mesh.gateway.send(message)
    await mesh.settle()


async def begin(mesh: Mesh, num_tokens: int = 2, **fields: Any) -> None:
    """A request that has some tokens and goes no further by itself."""
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", **fields)
    while len(mesh.detokenizer.tokens("r")) < num_tokens:
        await mesh.until(lambda: len(mesh.executor.of(RunStep)) > mesh.executor.fake.num_rows_run)
        await mesh.executor.run(mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run])
        await mesh.settle()


async def go_on(mesh: Mesh) -> None:
    """Let the executor run what it was given, and all that follows."""
    mesh.executor.is_working = True
    plans = {message.plan.step_id: message for message in mesh.executor.of(RunStep)}  # some were sent again
    for message in list(plans.values())[mesh.executor.fake.num_rows_run :]:
        await mesh.executor.run(message)
    await mesh.settle()


# Attempts.


async def test_a_later_attempt_goes_on_from_the_output_it_brings(mesh: Mesh) -> None:
    await mesh.ready()
    resumed = (ResumedChoice(int32s(output()[:3])), ResumedChoice(int32s(output(1)), FinishReason.LENGTH))
    await mesh.submit("r", num_choices=2, attempt=2, resumed=resumed)
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.gateway.received == [RequestAccepted(R, SCHEDULER, len(PROMPT), 2)]
    assert [opened.attempt for opened in mesh.detokenizer.opened("r")] == [2]
    first = [t for e in mesh.detokenizer.entries("r") if e.index == 0 for t in e.token_ids]
    second = [e for e in mesh.detokenizer.entries("r") if e.index == 1]
    assert first == output()
    assert [(list(e.token_ids), e.finish_reason) for e in second] == [(output(1), FinishReason.LENGTH)]
    (closed,) = mesh.detokenizer.closed()
    assert (closed.outcome, closed.usage.num_output_tokens, closed.attempt) == (Outcome.COMPLETED, (5, 5), 2)
    assert mesh.service.status().num_output_tokens == 2, "only what was computed here is counted here"


async def test_an_attempt_of_which_only_the_end_was_missing_ends_at_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", attempt=2, resumed=(ResumedChoice(int32s(output()), FinishReason.LENGTH),))
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.tokens("r") == output()
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (5,)
    assert mesh.executor.of(RunStep) == []
    assert mesh.service.is_idle()


async def test_a_later_attempt_takes_the_place_of_an_earlier_one_without_a_word(mesh: Mesh) -> None:
    await begin(mesh)
    await mesh.submit("r", attempt=2, resumed=(ResumedChoice(int32s(output()[:2])),))
    await mesh.settle()
    await go_on(mesh)
    await mesh.until(mesh.detokenizer.closed)
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [2]
    assert mesh.detokenizer.tokens("r") == output()
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks
    assert mesh.service.is_idle()


async def test_an_earlier_attempt_is_not_heard_any_more(mesh: Mesh) -> None:
    await begin(mesh, attempt=2)
    await mesh.submit("r", attempt=1)
    await tell(mesh, CancelRequest(R, GATEWAY, 1))
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert len(mesh.gateway.received) == 1
    assert len(mesh.detokenizer.opened("r")) == 1
    await go_on(mesh)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]


async def test_a_later_attempt_after_the_end_runs(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    await mesh.submit("r", attempt=2)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 2)
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [1, 2]


async def test_a_cancel_before_an_attempt_cancels_it_and_no_later_one(mesh: Mesh) -> None:
    await mesh.ready()
    await tell(mesh, CancelRequest(R, GATEWAY, 2))
    await mesh.submit("r", attempt=2)
    await mesh.until(mesh.detokenizer.closed)
    await mesh.submit("r", attempt=3)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 2)
    ends = [(closed.attempt, closed.outcome) for closed in mesh.detokenizer.closed()]
    assert ends == [(2, Outcome.CANCELLED), (3, Outcome.COMPLETED)]


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_waiting_requests=1)], indirect=True)
async def test_what_was_let_in_once_does_not_have_to_fit_into_the_queue_again(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    for number in range(20):
        await mesh.submit(f"r{number}")
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    await mesh.submit("moved", attempt=2)
    await mesh.until(lambda: RequestAccepted(RequestId("moved"), SCHEDULER, len(PROMPT), 2) in mesh.gateway.received)


async def test_a_refusal_names_its_attempt(mesh: Mesh) -> None:
    await begin(mesh)
    mesh.service.drain(60)
    await mesh.submit("x", attempt=3)
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    assert mesh.gateway.of(RequestRefused)[0].attempt == 3


# Saying it again.


async def test_a_gateway_that_has_everything_is_told_nothing(mesh: Mesh) -> None:
    await begin(mesh)
    num_messages = len(mesh.detokenizer.received)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (2,)))
    assert len(mesh.detokenizer.received) == num_messages


async def test_a_gateway_that_misses_something_is_told_everything_again(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (1,)))
    first, again = mesh.detokenizer.opened("r")
    assert (first.attempt, again.attempt) == (1, 1)
    assert again.replay > first.replay
    entry = mesh.detokenizer.entries("r")[-1]
    assert (entry.offset, list(entry.token_ids)) == (0, output()[:2])
    await go_on(mesh)
    assert mesh.detokenizer.tokens("r") == output()
    assert len(mesh.detokenizer.closed()) == 1


async def test_a_flood_of_questions_is_answered_once(mesh: Mesh) -> None:
    await begin(mesh)
    mesh.clock.advance(1.0)
    for _ in range(10):
        await mesh.gateway.send(ReplayRequest(R, GATEWAY, 1, (0,)))
    await mesh.settle()
    assert len(mesh.detokenizer.opened("r")) == 2
    mesh.clock.advance(0.5)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert len(mesh.detokenizer.opened("r")) == 3


async def test_the_end_is_told_again_as_long_as_it_is_kept(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert len(mesh.detokenizer.closed()) == 2
    assert mesh.detokenizer.closed()[0] == mesh.detokenizer.closed()[1]
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()
    assert mesh.service.status().num_retained_requests == 1
    await mesh.pass_time(301.0)
    assert mesh.service.status().num_retained_requests == 0
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert mesh.gateway.of(RequestUnknown) == [RequestUnknown(R, SCHEDULER, 1)]


async def test_the_end_is_told_through_another_detokenizer_if_the_first_is_gone(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    second = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await second.start()
    await second.announce()
    await mesh.detokenizer.announce(is_leaving=True)
    await mesh.settle()
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert second.tokens("r") == output()
    assert len(second.closed()) == 1
    assert len(mesh.detokenizer.closed()) == 1
    await second.transport.close()


async def test_who_asks_for_what_is_not_there_is_told_so(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayRequest(RequestId("x"), GATEWAY, 1, (0,)))
    await tell(mesh, ReplayRequest(R, GATEWAY, 2, (0,)))
    unknown = [RequestUnknown(RequestId("x"), SCHEDULER, 1), RequestUnknown(R, SCHEDULER, 2)]
    assert mesh.gateway.of(RequestUnknown) == unknown, "a later attempt never arrived here"


async def test_a_detokenizer_that_missed_something_gets_the_log_again(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayLog(R, DETOKENIZER))
    first, again = mesh.detokenizer.opened("r")
    assert again == first, "to fill a gap it need not begin again"
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await go_on(mesh)
    await tell(mesh, ReplayLog(R, DETOKENIZER))
    assert len(mesh.detokenizer.closed()) == 2
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()


async def test_a_detokenizer_that_does_not_have_the_request_any_more_gets_nothing(mesh: Mesh) -> None:
    await begin(mesh)
    other = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await other.start()
    await tell(mesh, ReplayLog(R, other.instance_id))
    await tell(mesh, ReplayLog(RequestId("x"), other.instance_id))
    assert other.received == []
    await other.transport.close()


async def test_tokens_that_wait_to_be_sent_do_not_come_before_the_log_that_is_sent_again(mesh: Mesh) -> None:
    await begin(mesh)
    plan = mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run]
    mesh.service._requests.handle(ReplayRequest(R, GATEWAY, 1, (0,)), 100.0)
    await mesh.executor.run(plan)
    mesh.service._requests.handle(ReplayRequest(R, GATEWAY, 1, (0,)), 200.0)
    await mesh.settle()
    batch = mesh.detokenizer.received[-1]
    assert [(entry.offset, list(entry.token_ids)) for entry in batch.tokens] in (
        [(0, output()[:2]), (2, output()[2:3])],
        [(0, output()[:3])],
    )
    assert len(batch.opened) == 1


# What came before.


async def finish(mesh: Mesh, **fields: Any) -> RequestClosed:
    """The end of a request that waits a second for its first step and takes two more seconds."""
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", **fields)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    mesh.clock.advance(2.0)
    await go_on(mesh)
    await mesh.until(mesh.detokenizer.closed)
    (closed,) = mesh.detokenizer.closed()
    return closed


async def test_times_of_a_request_that_had_an_earlier_attempt_are_those_of_both(mesh: Mesh) -> None:
    past = RequestPast(age_s=10.0, queue_s=1.0, first_token_s=3.0, num_cached_tokens=7)
    closed = await finish(mesh, attempt=2, resumed=(ResumedChoice(int32s(output()[:2])),), past=past)
    assert (closed.timing.queue_s, closed.timing.first_token_s) == (1.0, 3.0)
    assert closed.timing.total_s == pytest.approx(12.0, abs=0.1)
    assert closed.usage.num_cached_tokens == 7, "what it found when it first ran"


async def test_what_nobody_knows_of_an_earlier_attempt_is_what_happens_here(mesh: Mesh) -> None:
    closed = await finish(mesh, attempt=2, past=RequestPast(age_s=10.0))
    assert closed.timing.queue_s == pytest.approx(10.0, abs=0.1)
    assert closed.timing.first_token_s == pytest.approx(12.0, abs=0.1)
    assert closed.timing.total_s == pytest.approx(12.0, abs=0.1)
    assert closed.usage.num_cached_tokens == 0


async def test_a_request_ran_before_it_had_tokens_whoever_knows_when(mesh: Mesh) -> None:
    closed = await finish(mesh, attempt=2, past=RequestPast(age_s=10.0, first_token_s=3.0))
    assert closed.timing.queue_s == closed.timing.first_token_s == 3.0


async def test_who_takes_a_request_elsewhere_or_adopts_it_is_told_what_came_before(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await release(mesh, **RESUMABLE)
    mesh.clock.advance(3.0)
    await mesh.pass_time(0.25)
    past = mesh.gateway.of(RequestReleased)[-1].past
    assert past.age_s == pytest.approx(3.5, abs=0.3)
    assert (past.queue_s, past.first_token_s, past.num_cached_tokens) == (0.0, 0.0, 0)
    mesh.clock.advance(4.0)
    await tell(mesh, adopt())
    past = other.of(RequestAdopted)[-1].submission.past
    assert past.age_s == pytest.approx(7.5, abs=0.3)
    assert past.first_token_s == 0.0
    await other.transport.close()


# Gateways are lost.


async def lose_gateway(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await mesh.gateway.announce(is_leaving=True)
    await mesh.settle()


async def keep_alive(mesh: Mesh, seconds: float) -> None:
    """Let time pass for all but the gateway."""
    for _ in range(int(seconds)):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.detokenizer.announce()
        await mesh.settle()
        await mesh.pass_time(1.0)


async def test_a_resumable_request_outlives_its_gateway_for_a_while(mesh: Mesh) -> None:
    await begin(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await keep_alive(mesh, 29.0)
    status = mesh.service.status()
    assert (status.num_open_requests, status.num_orphaned_requests, status.num_running) == (1, 1, 1)
    await keep_alive(mesh, 2.0)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks


async def test_another_gateway_adopts_a_request_that_runs(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await other.announce()
    await begin(mesh, timeout_ms=60_000, **RESUMABLE)
    mesh.clock.advance(1.0)
    await lose_gateway(mesh)
    await ask_all(mesh, find())
    assert other.received == [RequestFound("query", R, SCHEDULER, 1)]
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.query_id, adopted.scheduler_id, adopted.has_ended) == ("query", SCHEDULER, False)
    assert adopted.num_output_tokens == (2,)
    submission = adopted.submission
    assert (submission.gateway_id, submission.timeout_ms, submission.client) == (OTHER, 59_000, b"chat")
    assert submission.attempt == ADOPTED
    assert submission.prompt_token_ids.tolist() == PROMPT
    opened = mesh.detokenizer.opened("r")[-1]
    assert (opened.gateway_id, opened.attempt) == (OTHER, ADOPTED)
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_orphaned_requests == 0
    await go_on(mesh)
    assert [(closed.outcome, closed.attempt) for closed in mesh.detokenizer.closed()] == [(Outcome.COMPLETED, ADOPTED)]
    await other.transport.close()


async def test_looking_for_a_request_moves_nothing(mesh: Mesh) -> None:
    """A client may have asked one gateway and gone to another one meanwhile: late questions take nothing away."""
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    for _ in range(3):
        await ask_all(mesh, find())
    assert other.of(RequestFound) == [RequestFound("query", R, SCHEDULER, 1)] * 3
    assert mesh.gateway.of(RequestMoved) == []
    await go_on(mesh)
    assert [opened.gateway_id for opened in mesh.detokenizer.opened("r")] == [GATEWAY]
    await other.transport.close()


async def test_a_late_adoption_takes_nothing_from_the_gateway_that_was_faster(mesh: Mesh) -> None:
    late, served = GatewayPeer(mesh.broker, OTHER), GatewayPeer(mesh.broker, InstanceId("gateway-3"))
    await late.start()
    await served.start()
    await begin(mesh, **RESUMABLE)
    await ask_all(mesh, find())
    await ask_all(mesh, find(gateway_id=served.instance_id))
    await tell(mesh, adopt(gateway_id=served.instance_id))
    now = attempts.after_adoption(1, served.instance_id)
    await tell(mesh, adopt())
    assert late.received == [RequestFound("query", R, SCHEDULER, 1), RequestFound("query", R, SCHEDULER, now)]
    assert served.of(RequestMoved) == []
    assert mesh.detokenizer.opened("r")[-1].gateway_id == served.instance_id
    await tell(mesh, adopt(now))
    assert len(late.of(RequestAdopted)) == 1, "if its client still waits, it is the newer one"
    assert served.of(RequestMoved) == [RequestMoved(R, SCHEDULER, attempts.after_adoption(now, OTHER))]
    for peer in (late, served):
        await peer.transport.close()


async def test_an_adoption_whose_answer_was_lost_is_made_again(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await tell(mesh, adopt())
    await ask_all(mesh, find())
    assert other.of(RequestFound)[-1].attempt == ADOPTED
    await tell(mesh, adopt(ADOPTED))
    assert len(other.of(RequestAdopted)) == 2
    assert other.of(RequestMoved) == []
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2], "its output is said again, too"
    assert mesh.detokenizer.opened("r")[-1].attempt == other.of(RequestAdopted)[-1].submission.attempt
    await other.transport.close()


async def test_a_gateway_whose_request_was_adopted_is_told_and_not_obeyed_any_more(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await tell(mesh, adopt())
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)]
    await tell(mesh, CancelRequest(R, GATEWAY, 1))
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)] * 4, "should it have missed the first"
    await mesh.submit("r", attempt=2, **RESUMABLE)
    await mesh.settle()
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)] * 5, "nor a later attempt of its own"
    await lose_gateway(mesh)
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_open_requests == 1
    await tell(mesh, CancelRequest(R, OTHER, ADOPTED))
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    await other.transport.close()


async def test_an_ended_request_is_adopted_with_its_output_and_its_end(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await mesh.ready()
    await mesh.submit("r", **RESUMABLE)
    await mesh.until(mesh.detokenizer.closed)
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.has_ended, adopted.num_output_tokens) == (True, (5,))
    assert mesh.detokenizer.opened("r")[-1].gateway_id == OTHER
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [1, ADOPTED]
    await other.transport.close()


@pytest.mark.parametrize(
    ("fields", "owner", "request_id"),
    [(RESUMABLE, "somebody else", "r"), (RESUMABLE, "me", "another"), ({"owner": "me"}, "me", "r")],
    ids=["another owner", "another request", "not resumable"],
)
async def test_nobody_gets_what_is_not_his(mesh: Mesh, fields: dict[str, Any], owner: str, request_id: str) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **fields)
    await ask_all(mesh, find(owner, request_id))
    await tell(mesh, replace(adopt(), owner=owner, request_id=RequestId(request_id)))
    assert other.received == []
    assert [opened.gateway_id for opened in mesh.detokenizer.opened("r")] == [GATEWAY]
    await other.transport.close()


async def test_a_gateway_that_only_slept_keeps_its_requests(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await begin(mesh, **RESUMABLE)
    await keep_alive(mesh, 20.0)
    assert mesh.service.status().num_orphaned_requests == 1
    await mesh.gateway.announce()
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_orphaned_requests == 0
    await go_on(mesh)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]


async def test_a_stop_string_that_a_replay_finds_late_still_ends_the_choice(mesh: Mesh) -> None:
    await begin(mesh, num_tokens=3, **RESUMABLE)
    await tell(mesh, adopt())
    await mesh.detokenizer.send(StopStringFound(R, 0, 2))
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (2,)


async def test_without_the_broker_nobody_is_given_up(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await begin(mesh)
    await mesh.settle()
    mesh.transport._is_connected = False
    await mesh.pass_time(30.0)
    assert mesh.service.status().num_open_requests == 1
    assert len(mesh.service.status().executors) == 1
    mesh.transport._is_connected = True
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.announce(**({"held_by": SCHEDULER} if peer is mesh.executor else {}))
    await mesh.settle()
    await mesh.pass_time(0.5)
    await go_on(mesh)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]


# Other schedulers go on.


async def announce_another_scheduler(mesh: Mesh, *models: str) -> None:
    beat = Presence(Service.SCHEDULER, OTHER_SCHEDULER, "other", models, SchedulerStatus())
    await mesh.gateway.transport.publish(subjects.presence(Service.SCHEDULER), encode(beat))
    await mesh.settle()


def releases(gateway: GatewayPeer) -> list[tuple[RequestId, InstanceId, int]]:
    """What a gateway was told of attempts that have to go on elsewhere."""
    return [(told.request_id, told.scheduler_id, told.attempt) for told in gateway.of(RequestReleased)]


async def release(mesh: Mesh, **fields: Any) -> None:
    """A request that has two tokens, and whose executor is gone while another scheduler has one."""
    await mesh.gateway.announce()
    await begin(mesh, **fields)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]


async def pass_time_of_all(mesh: Mesh, seconds: float, *gateways: GatewayPeer) -> None:
    """Let time pass; the other scheduler, the detokenizer and these gateways live on."""
    for _ in range(int(2 * seconds)):
        await mesh.detokenizer.announce()
        for gateway in gateways:
            await gateway.announce()
        await announce_another_scheduler(mesh, "model")
        await mesh.pass_time(0.5)


async def test_what_no_executor_here_can_go_on_with_is_for_a_scheduler_that_has_one(mesh: Mesh) -> None:
    await begin(mesh)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh)
    await mesh.pass_time(0.25)
    assert mesh.gateway.of(RequestReleased) == [], "the other one has none either"
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]
    assert mesh.detokenizer.closed() == [], "it has not ended"


async def test_what_is_released_is_kept_until_it_goes_on_elsewhere(mesh: Mesh) -> None:
    await release(mesh)
    await pass_time_of_all(mesh, 60.0, mesh.gateway)
    assert len(mesh.gateway.of(RequestReleased)) > 60, "each may be lost"
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2], "its gateway takes along what there is"
    assert not mesh.service.is_idle()
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    assert mesh.service.is_idle()
    assert mesh.detokenizer.closed() == [], "nobody is told of an end"
    num_told = len(mesh.gateway.of(RequestReleased))
    await pass_time_of_all(mesh, 2.0, mesh.gateway)
    assert len(mesh.gateway.of(RequestReleased)) == num_told
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert mesh.gateway.of(RequestUnknown) == [RequestUnknown(R, SCHEDULER, 1)]


async def test_a_released_request_survives_its_gateway_and_is_adopted_with_its_output(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await release(mesh, timeout_ms=60_000, **RESUMABLE)
    await lose_gateway(mesh)
    await pass_time_of_all(mesh, 20.0)
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.num_output_tokens, adopted.has_ended) == ((2,), False)
    assert adopted.submission.timeout_ms == pytest.approx(39_750, abs=500)
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await mesh.pass_time(0.25)
    assert other.of(RequestReleased) == [], "what there is needs a moment to arrive there"
    await mesh.pass_time(0.25)
    assert releases(other) == [(R, SCHEDULER, ADOPTED)]
    await tell(mesh, CancelRequest(R, OTHER, ADOPTED, goes_on=True))
    assert mesh.service.is_idle()
    await other.transport.close()


async def test_nothing_computes_a_released_request_when_an_executor_comes(mesh: Mesh) -> None:
    await release(mesh)
    mesh.executor.restart()
    await mesh.executor.announce()
    await mesh.until(lambda: mesh.service.models() == ("model",))
    num_plans = len(mesh.executor.of(RunStep))
    await mesh.pass_time(1.0)
    assert len(mesh.executor.of(RunStep)) == num_plans
    mesh.executor.is_working = True
    await mesh.submit("r", attempt=2, resumed=(ResumedChoice(int32s(output()[:2])),))
    await mesh.until(mesh.detokenizer.closed)
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [2]
    assert mesh.detokenizer.tokens("r") == output()
    assert mesh.service.is_idle()
    assert not mesh.service._requests._releases


async def test_a_refused_attempt_does_not_cost_the_earlier_one_that_is_kept(mesh: Mesh) -> None:
    await release(mesh, **RESUMABLE)
    await mesh.submit("r", attempt=2, **RESUMABLE)
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    assert mesh.service.status().num_open_requests == 1


async def test_a_released_request_that_is_cancelled_ends(mesh: Mesh) -> None:
    await release(mesh)
    await tell(mesh, CancelRequest(R, GATEWAY, 1))
    assert [(closed.outcome, closed.usage.num_output_tokens) for closed in mesh.detokenizer.closed()] == [
        (Outcome.CANCELLED, (2,))
    ]
    assert mesh.service.is_idle()
    assert not mesh.service._requests._releases


async def test_the_time_of_a_released_request_runs_out(mesh: Mesh) -> None:
    await release(mesh, timeout_ms=2000)
    await pass_time_of_all(mesh, 2.0, mesh.gateway)
    (closed,) = mesh.detokenizer.closed()
    assert closed.error is not None
    assert closed.error.code == "deadline_exceeded"
    assert mesh.service.is_idle()


async def test_a_released_request_that_nobody_comes_for_is_given_up_after_all_others(mesh: Mesh) -> None:
    """If it goes on elsewhere, without a gateway too, then that scheduler tells its end first."""
    await release(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await pass_time_of_all(mesh, 34.0)
    assert mesh.service.status().num_orphaned_requests == 1
    await pass_time_of_all(mesh, 2.0)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    assert mesh.service.is_idle()


async def test_what_has_no_gateway_waits_for_one_before_it_is_released(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.5)
    assert mesh.service.status().num_open_requests == 1
    assert mesh.gateway.of(RequestReleased) == []
    await tell(mesh, adopt())
    await mesh.pass_time(0.25)
    assert releases(other) == [(R, SCHEDULER, ADOPTED)]
    await other.transport.close()


async def test_a_draining_scheduler_lets_its_executors_go_if_another_scheduler_is_there(mesh: Mesh) -> None:
    await begin(mesh)
    await announce_another_scheduler(mesh)
    mesh.service.drain(60)
    await mesh.pass_time(0.25)
    assert mesh.executor.of(DetachExecutor) == [DetachExecutor(SCHEDULER, 1)]
    assert not mesh.service.is_idle()
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]
    assert not mesh.service.is_idle(), "it stays until the request is known to go on"
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    assert mesh.service.is_idle()
