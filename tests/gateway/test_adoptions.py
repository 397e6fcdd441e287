"""Requests of other gateways: found, adopted, and let go when this gateway leaves."""

import asyncio

import pytest

from services.gateway.config import GatewayConfig
from shared import attempts
from shared.errors import NotFound, Overloaded, Unavailable
from shared.ids import InstanceId, Service
from shared.messages import FinishReason, Outcome, RequestFound, RequestMoved, RequestPast, SubmitTokens
from tests.gateway.elsewhere import CLIENT, R, adopt, adopted, find, look, mesh_side, open_request, tell
from tests.gateway.fake_mesh import PATIENCE_S, logprobs_of
from tests.gateway.harness import OTHER_SCHEDULER, Harness, running_gateway


async def test_a_request_of_another_gateway_is_adopted_with_all_that_was_said(harness: Harness) -> None:
    found, request = await adopt(harness)
    assert (found.client, found.num_tokens) == (CLIENT, (2,))
    assert found.stream.is_accepted
    harness.mesh.attach([found.stream])
    await request.say("ab", num_tokens=2)
    await request.say("c")
    await request.finish()
    await harness.nothing_is_left()
    assert found.stream.choices[0].text == "abc"
    assert found.stream.end is not None
    assert found.stream.end.outcome is Outcome.COMPLETED
    assert harness.mesh.requests.num_ended == {Outcome.COMPLETED: 1}
    assert harness.gateway.status().num_requests == 1


async def test_an_adopted_request_begins_without_a_reader(harness: Harness) -> None:
    found, _ = await adopt(harness)
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(1.5)
    assert await harness.fake.next_cancellation() == found.stream.request_id


async def test_the_end_of_a_request_that_was_told_elsewhere_is_not_counted_here(harness: Harness) -> None:
    found, request = await adopt(harness, has_ended=True)
    await request.say("ab", num_tokens=2)
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert found.stream.end is not None
    assert found.stream.end.outcome is Outcome.CANCELLED, "as it ended then"
    assert not harness.mesh.requests.num_ended
    assert harness.gateway.status().num_requests == 0


async def test_an_adopted_request_goes_on_at_another_scheduler_too(harness: Harness) -> None:
    found, request = await adopt(harness)
    harness.mesh.attach([found.stream])
    await request.say("ab", num_tokens=2, logprobs=[logprobs_of("a"), logprobs_of("b")])
    await harness.advance(5.0)
    submitted: asyncio.Queue[SubmitTokens] = asyncio.Queue()
    await harness.fake.take_submissions(OTHER_SCHEDULER, submitted.put_nowait)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    message = await asyncio.wait_for(submitted.get(), PATIENCE_S)
    assert message.attempt == request.message.attempt + 1
    assert (message.prompt_token_ids.tolist(), message.client) == ([1, 2, 3], CLIENT)
    assert message.past == RequestPast(age_s=25.0, queue_s=1.0, first_token_s=2.0, num_cached_tokens=3)
    assert message.gateway_id == harness.gateway.identity.instance_id
    assert [list(choice.token_ids) for choice in message.resumed] == [[0, 1]]


async def test_of_two_schedulers_that_answer_the_one_with_the_later_attempt_counts(harness: Harness) -> None:
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    looking, query_id = await look(harness)
    first = await find(harness, query_id, 1)
    second = await find(harness, query_id, 2, by=OTHER_SCHEDULER)
    assert second.next_attempt > first.next_attempt, "both may come about"
    await tell(harness, adopted(harness, query_id, first.next_attempt))
    found = await looking
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.attempt, told.goes_on) == (2, True), "should it have missed that it is wanted"
    early = mesh_side(harness, adopted(harness, "", first.next_attempt))
    await tell(harness, adopted(harness, query_id, second.next_attempt, by=OTHER_SCHEDULER))
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.request_id, told.attempt, told.goes_on) == (R, first.next_attempt, True)
    await early.say("x")
    await early.close(Outcome.CANCELLED)
    late = mesh_side(harness, adopted(harness, "", second.next_attempt, by=OTHER_SCHEDULER))
    await late.say("abc")
    await late.finish()
    await harness.nothing_is_left()
    assert found.stream.choices[0].text == "abc"


async def test_an_adoption_that_comes_about_after_a_later_one_is_dismissed(harness: Harness) -> None:
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    looking, query_id = await look(harness)
    first = await find(harness, query_id, 1)
    second = await find(harness, query_id, 2, by=OTHER_SCHEDULER)
    await tell(harness, adopted(harness, query_id, second.next_attempt, by=OTHER_SCHEDULER))
    assert (await looking).stream.is_accepted
    while not harness.fake.cancellations.empty():
        harness.fake.cancellations.get_nowait()
    await tell(harness, adopted(harness, query_id, first.next_attempt))
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.attempt, told.goes_on) == (first.next_attempt, True)


async def test_an_earlier_attempt_that_is_found_late_is_dismissed(harness: Harness) -> None:
    looking, query_id = await look(harness)
    await find(harness, query_id, 2)
    await tell(harness, RequestFound(query_id, R, OTHER_SCHEDULER, 1))
    assert harness.fake.adoptions.empty(), "a later one was found already"
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    answer = adopted(harness, query_id, attempts.after_adoption(2, harness.gateway.identity.instance_id))
    await tell(harness, answer)
    await looking
    for _ in range(2):
        told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
        assert (told.attempt, told.goes_on) == (1, True)
        await tell(harness, RequestFound("late", R, OTHER_SCHEDULER, 1))
    await tell(harness, RequestFound("late", R, OTHER_SCHEDULER, 2 * answer.submission.attempt))
    assert (await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)).attempt == 1
    assert harness.fake.cancellations.empty(), "whoever has a later one knows better"


async def test_what_is_found_for_a_client_that_has_left_stays_where_it_is(harness: Harness) -> None:
    looking, query_id = await look(harness)
    looking.cancel()
    await harness.settle()
    assert len(harness.mesh.adoptions) == 0
    await tell(harness, RequestFound(query_id, R, harness.fake.scheduler_id, 1))
    assert harness.fake.adoptions.empty()
    assert harness.fake.cancellations.empty()


async def test_an_adoption_that_somebody_else_forestalled_is_made_again_for_a_client_that_waits(
    harness: Harness,
) -> None:
    looking, query_id = await look(harness)
    await find(harness, query_id, 1)
    taken = attempts.after_adoption(1, InstanceId("gateway-faster"))
    again = await find(harness, query_id, taken)
    await tell(harness, adopted(harness, query_id, again.next_attempt))
    assert (await looking).stream.is_accepted


async def test_nobody_answers_for_an_unknown_request(harness: Harness) -> None:
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    first = await harness.fake.next_search()
    await harness.advance(0.5)
    assert await harness.fake.next_search() == first, "the question may have been lost"
    assert not looking.done()
    await harness.advance(0.5)
    with pytest.raises(NotFound):
        await looking
    assert len(harness.mesh.adoptions) == 0


async def test_while_a_scheduler_may_come_back_nobody_says_that_a_request_is_unknown(harness: Harness) -> None:
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(2.0)
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_search()
    await harness.advance(1.5)
    with pytest.raises(Unavailable):
        await looking
    harness.fake.silent.clear()
    await harness.advance(GatewayConfig().failover_timeout_s)
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_search()
    await harness.advance(1.5)
    with pytest.raises(NotFound):
        await looking


async def test_a_scheduler_that_has_not_been_heard_since_may_have_what_is_looked_for(harness: Harness) -> None:
    """It died a moment ago, and does not count as dead yet."""
    await harness.advance(1.0)
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(0.5)
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_search()
    await harness.advance(1.0)
    with pytest.raises(Unavailable):
        await looking


async def test_a_gateway_that_is_new_does_not_know_who_was_lost_before() -> None:
    """A scheduler or gateway may have died just before it began, and the request be on its way to another one."""
    async with running_gateway(age_s=1.0) as harness:
        looking = asyncio.create_task(harness.mesh.resume(R, "me"))
        await harness.fake.next_search()
        await harness.advance(1.5)
        with pytest.raises(Unavailable) as caught:
            await looking
        assert (caught.value.status, caught.value.code) == (503, "unavailable")
        assert caught.value.retry_after_s is not None
        await harness.advance(GatewayConfig().failover_timeout_s)
        looking = asyncio.create_task(harness.mesh.resume(R, "me"))
        await harness.fake.next_search()
        await harness.advance(1.5)
        with pytest.raises(NotFound):
            await looking


async def test_an_answer_that_nobody_waits_for_any_more_is_cancelled_in_the_end(harness: Harness) -> None:
    await tell(harness, adopted(harness, "forgotten", attempts.after_adoption(1, InstanceId("gateway-1"))))
    await harness.advance(31.0)
    assert await harness.fake.next_cancellation() == R


async def test_a_request_that_its_client_reads_elsewhere_ends_here_without_being_cancelled(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await request.say("a")
    await tell(harness, RequestMoved(stream.request_id, harness.fake.scheduler_id, 1))
    assert len(harness.mesh.requests) == 1, "it is this gateway's own attempt"
    for _ in range(2):
        await tell(harness, RequestMoved(stream.request_id, harness.fake.scheduler_id, 2**43))
    assert stream.end is not None
    assert stream.end.error is not None
    assert stream.end.error.code == "resumed_elsewhere"
    assert len(harness.mesh.requests) == 0
    assert not harness.mesh.requests.num_ended, "it has not ended"
    await harness.mesh.cancel([stream])
    await harness.mesh.detach([stream])
    await harness.advance(60.0)
    assert harness.fake.cancellations.empty()


async def test_what_moved_while_it_was_handed_over_stops_where_it_was_handed_to(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (OTHER_SCHEDULER, 2)
    await tell(harness, RequestMoved(stream.request_id, harness.fake.scheduler_id, 2**43))
    assert stream.end is not None
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.request_id, told.attempt, told.goes_on) == (request.request_id, 2, True)


async def test_a_stream_of_an_earlier_stay_has_no_say_over_a_request_that_came_back(harness: Harness) -> None:
    found, earlier = await adopt(harness)
    moved = RequestMoved(R, harness.fake.scheduler_id, 2 * earlier.message.attempt)
    await tell(harness, moved)
    looking, query_id = await look(harness)
    asked = await find(harness, query_id, moved.attempt)
    answer = adopted(harness, query_id, asked.next_attempt)
    await tell(harness, answer)
    again, request = await looking, mesh_side(harness, answer)
    await tell(harness, moved)
    assert again.stream.end is None, "that was before"
    harness.mesh.attach([again.stream])
    await harness.mesh.cancel([found.stream])
    await harness.mesh.detach([found.stream])
    await harness.advance(60.0)
    assert harness.fake.cancellations.empty()
    await request.say("ab", finish_reason=FinishReason.STOP)
    await harness.settle()
    assert again.stream.choices[0].text == "ab"


async def test_a_leaving_gateway_lets_go_what_can_be_resumed_and_fails_the_rest(harness: Harness) -> None:
    resumable, _ = await open_request(harness)
    plain, _ = await open_request(harness, b"")
    await harness.mesh.end_all()
    assert resumable.end is None
    assert plain.end is not None
    assert await harness.fake.next_cancellation() == plain.request_id
    await harness.mesh.detach([resumable])
    await harness.advance(60.0)
    while not harness.fake.cancellations.empty():
        assert await harness.fake.next_cancellation() == plain.request_id, "again, since nobody confirms it"


async def test_what_a_leaving_gateway_looks_for_is_not_found(harness: Harness) -> None:
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_search()
    await harness.mesh.end_all()
    with pytest.raises(NotFound):
        await looking


async def test_a_gateway_that_drains_or_is_full_resumes_nothing() -> None:
    async with running_gateway(max_open_requests=1) as harness:
        stream, _ = await open_request(harness)
        with pytest.raises(Overloaded):
            await harness.mesh.resume(R, "me")
        assert (await harness.mesh.resume(stream.request_id, "me")).stream is stream
        harness.gateway.drain(10.0)
        with pytest.raises(Unavailable):
            await harness.mesh.resume(stream.request_id, "me")


async def test_without_the_broker_nobody_counts_as_gone(harness: Harness) -> None:
    stream, request = await open_request(harness)
    harness.transport._is_connected = False
    await harness.advance(30.0)
    assert not harness.mesh.requests.num_ended
    harness.transport._is_connected = True
    await harness.advance(3.0)
    assert harness.fake.submissions.empty()
    await request.say("a")
    await request.finish()
    await harness.nothing_is_left()
    assert stream.end is not None
    assert stream.end.outcome is Outcome.COMPLETED
