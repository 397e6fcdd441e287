"""A request that comes from another scheduler goes on here, as a later attempt, with all that came before."""

from typing import Any

import pytest

from services.scheduler.config import SchedulerConfig
from shared.ids import RequestId
from shared.messages import (
    CancelRequest,
    FinishReason,
    Outcome,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestPast,
    RequestRefused,
    RequestReleased,
    ResumedChoice,
    RunStep,
    int32s,
)
from tests.scheduler.harness import GATEWAY, PROMPT, SCHEDULER, GatewayPeer, Mesh
from tests.scheduler.one_request import OTHER, RESUMABLE, R, adopt, begin, go_on, output, release, tell


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
