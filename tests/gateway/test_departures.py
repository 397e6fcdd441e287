"""A service dies, or the gateway itself leaves: what the clients of open requests see."""

import asyncio
import json
from typing import Any

import pytest

from shared.errors import RequestError, Unavailable
from shared.ids import InstanceId, Service
from shared.messages import ErrorInfo, FinishReason, Outcome, RequestPast
from tests.gateway.fake_mesh import MODEL, FakeRequest, logprobs_of
from tests.gateway.harness import CHAT, Harness, assert_ended_once, events_of, running_gateway, text_of

PATH = "/v1/chat/completions"


OTHER = InstanceId("scheduler-bbbbbbbb")


# Who holds the request dies.


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
    await harness.fake.add_scheduler(OTHER)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (OTHER, 2)
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
    await harness.fake.add_scheduler(OTHER)
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
    await harness.fake.add_scheduler(OTHER)
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(2.5)
    again = await harness.fake.next_request()
    await again.accept()
    harness.fake.silent.clear()
    await harness.advance(0.5)
    told = await asyncio.wait_for(harness.fake.cancellations.get(), 5)
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
    await harness.fake.add_scheduler(OTHER)
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
    await harness.fake.add_scheduler(OTHER)
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


async def test_a_new_request_that_a_leaving_scheduler_refuses_goes_to_another_one(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.fake.add_scheduler(OTHER)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await request.refuse(ErrorInfo.of(Unavailable("shutting down")))
    again = await harness.fake.next_request()
    assert again.message.scheduler_id == OTHER
    await again.complete("a")
    assert (await asking)[0] == 200


async def change_hands(harness: Harness) -> None:
    """The scheduler with the executors drains, and another one is about to take them."""
    await harness.advance(0.5)
    await harness.fake.add_scheduler(OTHER, has_executors=False)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_new_request_waits_while_executors_change_hands(harness: Harness, is_stream: bool) -> None:
    await change_hands(harness)
    async with harness.http.get(harness.url + "/readyz") as report:
        assert report.status == 200, "a request would be served"
    asking = asyncio.create_task(harness.http.post(harness.url + PATH, json=CHAT | {"stream": is_stream}))
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    await harness.advance(3.0)
    assert not asking.done()
    assert harness.fake.submissions.empty()
    await harness.fake.give_executors(OTHER)
    request = await harness.fake.next_request()
    assert (request.message.scheduler_id, request.message.attempt) == (OTHER, 1)
    await request.complete("a")
    async with await asking as response:
        assert response.status == 200


async def test_a_new_request_waits_only_as_long_as_there_is_hope(harness: Harness) -> None:
    await change_hands(harness)
    asking = asyncio.create_task(harness.chat())
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    await harness.advance(4.0)
    assert not asking.done()
    await harness.advance(1.5)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    await harness.nothing_is_left()
    async with harness.http.get(harness.url + "/readyz") as report:
        assert report.status == 503


async def test_a_new_request_that_waits_ends_when_its_client_leaves(harness: Harness) -> None:
    await change_hands(harness)
    asking = asyncio.create_task(harness.chat())
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    asking.cancel()
    await harness.nothing_is_left()
    await harness.fake.give_executors(OTHER)
    await harness.advance(1.0)
    assert harness.fake.submissions.empty()


async def test_a_new_request_that_is_refused_just_before_executors_change_hands_waits_too(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.advance(0.5)
    await request.refuse(ErrorInfo.of(Unavailable("shutting down")))
    await harness.settle()
    assert not asking.done(), "why it was refused is not known here yet"
    await change_hands(harness)
    await harness.fake.give_executors(OTHER)
    await harness.advance(0.5)
    again = await harness.fake.next_request()
    while again.message.scheduler_id != OTHER:
        await again.refuse(ErrorInfo.of(Unavailable("shutting down")))
        await harness.advance(0.5)
        again = await harness.fake.next_request()
    await again.complete("a")
    assert (await asking)[0] == 200


async def test_a_new_request_that_the_only_scheduler_refuses_as_it_leaves_is_told_so(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()
    await request.refuse(ErrorInfo.of(Unavailable("shutting down", retry_after_s=2.0)))
    status, answer = await asyncio.wait_for(asking, 5)
    assert (status, answer["error"]["message"]) == (503, "shutting down")


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
    await harness.fake.add_scheduler(OTHER)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()
    await request.release()
    again = await harness.fake.next_request()
    assert (again.message.scheduler_id, again.message.attempt) == (OTHER, 2)
    assert [list(choice.token_ids) for choice in again.message.resumed] == [[0]]
    await request.release()
    await harness.settle()
    assert harness.fake.cancellations.empty(), "the next attempt may be lost on its way, and this gateway may die"
    await again.accept()
    await request.release()
    told = await asyncio.wait_for(harness.fake.cancellations.get(), 5)
    assert (told.request_id, told.attempt, told.goes_on) == (request.request_id, 1, True)
    await again.say("ab")
    await again.finish()
    assert_ended_once(await events_of(response), reason="stop")
    await request.release()
    told = await asyncio.wait_for(harness.fake.cancellations.get(), 5)
    assert (told.attempt, told.goes_on) == (1, True), "also once the request has ended"
    assert harness.fake.submissions.empty()


async def test_a_request_takes_along_what_is_behind_it(harness: Harness) -> None:
    """Its client counts from the beginning, whoever ends it."""
    response, request = await harness.open_stream(CHAT)
    await harness.advance(1.5)
    await request.say("a")
    await harness.settle()
    await harness.advance(2.0)
    await harness.fake.add_scheduler(OTHER)
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
    await harness.fake.announce(Service.SCHEDULER, OTHER)
    await harness.advance(3.0)
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")


async def test_a_lost_detokenizer_fails_its_requests_unless_another_goes_on() -> None:
    async with running_gateway(failover_timeout_s=5.0) as harness:
        response, request = await harness.open_stream(CHAT)
        await request.say("Hel")
        await harness.settle()
        harness.fake.silent.add(Service.DETOKENIZER)
        await harness.advance(6.0)
        assert len(harness.mesh.requests) == 1, "another one may come"
        harness.fake.silent.clear()
        harness.fake.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
        await harness.advance(8.0)
        again = FakeRequest(harness.fake, request.message)
        await again.say("Hello")
        await harness.settle()
        harness.fake.silent.add(Service.DETOKENIZER)
        await harness.advance(7.5)
        events = await events_of(response)
        assert_ended_once(events, error="unavailable")
        assert text_of(events) == "Hello"


async def test_what_a_lost_detokenizer_may_have_kept_is_asked_for_soon(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.settle()
    await harness.fake.announce(Service.DETOKENIZER, InstanceId("detokenizer-bbbbbbbb"))
    await harness.fake.announce(Service.DETOKENIZER, harness.fake.detokenizer_id, is_leaving=True)
    harness.fake.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
    await harness.advance(1.0)
    assert (await harness.fake.next_replay()).num_tokens == (1,)
    await request.finish()
    assert_ended_once(await events_of(response), reason="stop")


async def test_request_without_text_survives_if_a_detokenizer_comes_back(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    harness.fake.silent.add(Service.DETOKENIZER)
    await harness.advance(5.0)
    harness.fake.detokenizer_id = request.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
    harness.fake.silent.clear()
    await harness.advance(10.0)
    await request.complete("a")
    assert (await asking)[0] == 200


async def test_request_without_text_fails_if_no_detokenizer_comes_back(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    harness.fake.silent.add(Service.DETOKENIZER)
    await harness.advance(22.0)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")


# The gateway leaves.


async def test_draining_gateway_refuses_new_requests_and_finishes_the_others(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    harness.gateway.drain(10.0)
    async with harness.post(PATH, CHAT) as refused:
        assert refused.status == 503
        assert "Retry-After" in refused.headers
    async with harness.http.get(harness.url + "/readyz") as report:
        assert (report.status, (await report.json())["is_draining"]) == (503, True)
    async with harness.http.get(harness.url + "/healthz") as report:
        assert report.status == 200
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")
    await asyncio.wait_for(harness.running, 5)


async def test_drain_deadline_ends_what_is_left_with_one_error(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    asking, other = await harness.start_chat()
    await other.accept()
    await request.say("a")
    harness.gateway.drain(3.0)
    await harness.advance(3.5)
    await asyncio.wait_for(harness.running, 5)
    stopping = asyncio.create_task(harness.gateway.on_stop())
    events = await events_of(response)
    assert_ended_once(events, error="unavailable")
    assert text_of(events) == "a"
    assert (await asking)[0] == 503
    await stopping
    assert {await harness.fake.next_cancellation(), await harness.fake.next_cancellation()} == {
        request.request_id,
        other.request_id,
    }


async def test_idle_gateway_leaves_at_once(harness: Harness) -> None:
    harness.gateway.drain(1000.0)
    await asyncio.wait_for(harness.running, 5)


async def test_bug_in_a_shape_ends_its_stream_with_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    response, request = await harness.open_stream(CHAT)
    monkeypatch.setattr("services.gateway.chat.ChatShape.chunks", broken)
    await request.say("a")
    assert_ended_once(await events_of(response), error=RequestError.code)
    assert await harness.fake.next_cancellation() == request.request_id
    assert MODEL in harness.mesh.admission.models()
