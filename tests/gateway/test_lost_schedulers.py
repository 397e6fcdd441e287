"""A scheduler dies, or gives a request up: it goes on at another one, and its client sees none of it."""

import asyncio
import json

import pytest

from shared.errors import Unavailable
from shared.ids import Service
from shared.messages import ErrorInfo, FinishReason, Outcome, RequestPast
from tests.gateway.fake_mesh import PATIENCE_S, logprobs_of
from tests.gateway.harness import CHAT, OTHER_SCHEDULER, Harness, assert_ended_once, events_of, running_gateway, text_of


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_without_another_scheduler_requests_fail_after_a_while(is_accepted: bool) -> None:
    async with running_gateway(max_submissions=100, failover_timeout_s=5.0) as harness:
        asking, request = await harness.start_chat()
        if is_accepted:
            await request.accept()
        harness.fake.silent.add(Service.SCHEDULER)
        await harness.advance(6.5)
        assert not asking.done()
        await harness.advance(1.0)
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert "scheduler" in answer["error"]["message"]
        assert len(harness.mesh.requests) == 0
        harness.fake.silent.clear()
        await harness.advance(0.5)
        assert await harness.fake.next_cancellation() == request.request_id, "it only slept, and still has it"


async def test_a_request_goes_on_at_another_scheduler_from_the_tokens_that_are_here(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"n": 2, "logprobs": True, "top_logprobs": 1})
    first = [logprobs_of("a", -0.5, [("b", -0.25)]), logprobs_of("b", -1.5, [("c", -0.75)])]
    await request.say("ab", num_tokens=2, logprobs=first)
    await request.say("x", index=1, finish_reason=FinishReason.LENGTH, logprobs=[logprobs_of("x")])
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (OTHER_SCHEDULER, 2)
    assert (again.message.prompt, again.message.sampling) == (request.message.prompt, request.message.sampling)
    one, two = again.message.resumed
    assert (list(one.token_ids), one.finish_reason) == ([0, 1], None)
    known = [(each.logprob, list(each.top_logprobs)) for each in one.logprobs if each is not None]
    assert known == [(-0.5, [-0.25]), (-1.5, [-0.75])]
    assert (list(two.token_ids), two.finish_reason) == ([0], FinishReason.LENGTH)
    await again.accept()
    await again.say("abc", num_tokens=3, logprobs=[logprobs_of("c", -2.0)])
    await again.finish()
    events = await events_of(response)
    chunks = [json.loads(event) for event in events[:-1]]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == 0]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "abc"
    positions = [position for choice in choices if choice["logprobs"] for position in choice["logprobs"]["content"]]
    assert [position["logprob"] for position in positions] == [-0.5, -1.5, -2.0]
    assert events.count("[DONE]") == 1


async def test_a_request_that_was_not_acknowledged_goes_to_another_scheduler_too(harness: Harness) -> None:
    asking, _ = await harness.start_chat(timeout_ms=60_000)
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(1.0)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    again = await harness.fake.next_request()
    assert (again.message.attempt, again.message.resumed) == (2, ())
    assert again.message.timeout_ms == 59_000, "the time that has passed does not begin again"
    await again.complete("a")
    assert (await asking)[0] == 200


async def test_a_scheduler_that_only_slept_is_told_and_what_it_says_of_the_end_means_nothing(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(2.5)
    again = await harness.fake.next_request()
    await again.accept()
    harness.fake.silent.clear()
    await harness.advance(0.5)
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.request_id, told.attempt) == (request.request_id, 1)
    await request.say("�")  # it was stopped in the middle of a character
    await request.close(Outcome.CANCELLED)
    await again.say("abc")
    await again.finish()
    events = await events_of(response)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "abc"


async def test_a_scheduler_that_comes_back_after_the_end_is_told_to_stop(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(2.5)
    await (await harness.fake.next_request()).complete("a")
    assert_ended_once(await events_of(response), reason="stop")
    assert harness.fake.cancellations.empty()
    harness.fake.silent.clear()
    await harness.advance(0.5)
    assert await harness.fake.next_cancellation() == request.request_id


async def test_a_scheduler_that_takes_nothing_at_the_moment_is_asked_again(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    harness.fake.silent.add(Service.SCHEDULER)
    refused = await harness.fake.next_request()
    await refused.refuse(ErrorInfo.of(Unavailable("no executor at the moment")))
    await harness.advance(1.0)
    again = await harness.fake.next_request()
    assert (refused.message.attempt, again.message.attempt) == (2, 3)
    await again.accept()
    await again.say("ab")
    await again.finish()
    assert text_of(await events_of(response)) == "ab"


async def test_a_scheduler_that_does_not_know_a_request_gets_it_again(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.settle()
    await harness.advance(2.0)
    asked = await harness.fake.next_replay()
    assert (asked.request_id, asked.attempt, asked.num_tokens) == (request.request_id, 1, (1,))
    await request.deny()
    await request.deny()  # the answer to another question, late
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (harness.fake.scheduler_id, 2)
    await again.accept()
    await again.say("ab")
    await again.finish()
    assert_ended_once(await events_of(response), reason="stop")
    assert harness.fake.submissions.empty()


async def test_a_released_request_goes_on_elsewhere_and_only_then_is_its_scheduler_let_off(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()
    await request.release()
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (OTHER_SCHEDULER, 2)
    assert [list(choice.token_ids) for choice in again.message.resumed] == [[0]]
    await request.release()
    await harness.settle()
    assert harness.fake.cancellations.empty(), "the next attempt may be lost on its way, and this gateway may die"
    await again.accept()
    await request.release()
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.request_id, told.attempt, told.goes_on) == (request.request_id, 1, True)
    await again.say("ab")
    await again.finish()
    assert_ended_once(await events_of(response), reason="stop")
    await request.release()
    told = await asyncio.wait_for(harness.fake.cancellations.get(), PATIENCE_S)
    assert (told.attempt, told.goes_on) == (1, True), "also once the request has ended"
    assert harness.fake.submissions.empty()


async def test_a_request_takes_along_what_is_behind_it(harness: Harness) -> None:
    """Its client counts from the beginning, whoever ends it."""
    response, request = await harness.open_stream(CHAT)
    await harness.advance(1.5)
    await request.say("a")
    await harness.settle()
    await harness.advance(2.0)
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    second = await harness.fake.next_request()
    past = RequestPast(age_s=3.5, first_token_s=1.5)
    assert second.message.past == past, "as far as this gateway can know"
    await second.accept()
    await harness.advance(1.0)
    known = RequestPast(age_s=4.75, queue_s=0.5, first_token_s=1.25, num_cached_tokens=2)
    await second.release(known)
    third = await harness.fake.next_request()
    assert third.message.past == known, "as its scheduler says"
    await third.complete("ab")
    assert_ended_once(await events_of(response), reason="stop")
    assert request.message.past is None


async def test_a_request_may_be_released_as_often_as_it_likes(harness: Harness) -> None:
    """Nobody has lost it, so it is not under suspicion of killing schedulers."""
    response, request = await harness.open_stream(CHAT)
    for _ in range(20):
        await request.release()
        request = await harness.fake.next_request()
        await request.accept()
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")


async def test_a_released_request_that_is_being_cancelled_is_not_submitted_again(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    await harness.settle()
    asking.cancel()
    assert await harness.fake.next_cancellation() == request.request_id
    await request.release()
    await harness.settle()
    assert harness.fake.submissions.empty()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()


async def test_a_request_that_every_scheduler_loses_fails_in_the_end(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    for _ in range(8):
        await request.deny()
        await harness.settle()
        if not harness.fake.submissions.empty():
            request = await harness.fake.next_request()
            await request.accept()
    assert_ended_once(await events_of(response), error="unavailable")
    assert harness.fake.submissions.empty()


async def test_other_schedulers_death_changes_nothing(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await harness.fake.announce(Service.SCHEDULER, OTHER_SCHEDULER)
    await harness.advance(3.0)
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")
