"""How a request ends when messages come twice, late or never: one terminal event on every path, nothing left over."""

import asyncio
from typing import Any

import pytest

from shared import subjects
from shared.errors import Disconnected, InvalidRequest, Overloaded, RequestError, Unavailable
from shared.ids import RequestId
from shared.messages import ErrorInfo, FinishReason, Outcome, RequestAccepted
from tests.gateway.fake_mesh import MODEL, FakeRequest
from tests.gateway.harness import CHAT, CHAT_PATH, Harness, assert_ended_once, events_of, text_of

# Ends that the mesh brings about.


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_stream_ends_once_with_its_finish_reason(harness: Harness, reason: FinishReason) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.finish(reason)
    await request.finish(reason)
    await request.close(Outcome.FAILED)
    assert_ended_once(await events_of(response), reason=str(reason))
    assert harness.mesh.requests.num_ended == {Outcome.COMPLETED: 1}
    await harness.nothing_is_left()


async def test_refusal_before_the_first_byte_has_its_own_status(harness: Harness) -> None:
    error = ErrorInfo.of(InvalidRequest("Too long.", param="messages"))
    for is_stream in (False, True):
        asking, request = await harness.start_chat(stream=is_stream)
        await request.refuse(error)
        await request.refuse(error)
        status, answer = await asking
        assert (status, answer["error"]["message"], answer["error"]["param"]) == (400, "Too long.", "messages")
    assert harness.mesh.requests.num_ended == {Outcome.FAILED: 2}
    assert harness.fake.cancellations.empty(), "a request that was never started needs no cancelling"


async def test_failure_in_mid_stream_is_an_error_event(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.close(Outcome.FAILED, ErrorInfo(500, "server_error", "numbers", "Not a number.", None))
    events = await events_of(response)
    assert_ended_once(events, error="numbers")
    assert text_of(events) == "a"


async def test_failure_of_a_whole_answer_has_its_own_status(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    await request.say("a")
    await request.close(Outcome.FAILED, ErrorInfo(503, "service_unavailable_error", "unavailable", "Gone.", None, 1.0))
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (503, "Gone.")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "seconds", "header"),
    [
        (Overloaded, 0.2, "1"),
        (Overloaded, 7.0, "7"),
        (Overloaded, None, "1"),
        (Unavailable, 2.01, "3"),
        (Unavailable, None, "1"),
        (InvalidRequest, None, None),
    ],
)
async def test_refusal_says_in_whole_seconds_when_to_try_again(
    harness: Harness, kind: type[RequestError], seconds: float | None, header: str | None, is_stream: bool
) -> None:
    asking = asyncio.create_task(harness.http.post(harness.url + CHAT_PATH, json=CHAT | {"stream": is_stream}))
    request = await harness.fake.next_request()
    await request.refuse(ErrorInfo.of(kind("Later.", retry_after_s=seconds)))
    if kind is Unavailable:  # somebody else might take it in a moment
        await harness.advance(6.0)
    async with await asking as response:
        assert response.status == kind.status
        assert response.headers.get("Retry-After") == header


async def test_failure_without_a_reason_is_still_an_error(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.close(Outcome.FAILED)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (500, "internal_error")


async def test_cancellation_that_nobody_asked_for_is_an_error(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.close(Outcome.CANCELLED)
    assert_ended_once(await events_of(response), error="unavailable")


async def test_text_before_the_acceptance_counts_as_one(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.say("a")
    await request.accept()
    await request.finish()
    assert (await asking)[1]["choices"][0]["message"]["content"] == "a"


async def test_refusal_of_a_repetition_does_not_end_what_was_accepted(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.refuse(ErrorInfo.of(InvalidRequest("Twice.")))
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")


async def test_messages_about_unknown_requests_are_counted_and_change_nothing(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.complete("a")
    await asking
    await request.accept()
    await request.say("more")
    await request.close(Outcome.FAILED)
    await harness.fake.send_to(
        harness.gateway.identity.instance_id,
        RequestAccepted(RequestId("req-x"), request.message.scheduler_id, 1),
    )
    await harness.settle()
    assert harness.mesh.requests.num_orphans == 4
    assert harness.mesh.requests.num_ended == {Outcome.COMPLETED: 1}


async def test_unreadable_message_is_dropped(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.transport.publish(subjects.inbox(harness.gateway.identity.instance_id), b"\xc1")
    await request.complete("a")
    assert (await asking)[0] == 200
    assert harness.gateway.num_dropped_messages == 1


async def test_bug_in_a_shape_ends_its_stream_with_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    response, request = await harness.open_stream(CHAT)
    monkeypatch.setattr("services.gateway.chat.ChatShape.chunks", broken)
    await request.say("a")
    assert_ended_once(await events_of(response), error=RequestError.code)
    assert await harness.fake.next_cancellation() == request.request_id
    assert MODEL in harness.mesh.admission.models()


# Lost and repeated messages.


async def test_repeated_and_overlapping_text_is_dropped(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    first, second = request.piece("Hel"), request.piece("lo")
    await request.send_piece(first)
    await request.send_piece(second)
    await request.send_piece(first)
    replay = FakeRequest(harness.fake, request.message)
    await replay.say("Hello, wor", num_tokens=3)
    await replay.say("ld")
    await replay.finish()
    events = await events_of(response)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "Hello, world"


async def test_a_gap_in_the_text_is_asked_for_at_once_and_filled(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    request.piece("b")  # lost on its way
    await request.say("c")
    await request.say("d")
    await harness.settle()
    await harness.advance(0.25)
    asked = await harness.fake.next_replay()
    assert (asked.request_id, asked.num_tokens) == (request.request_id, (1,))
    assert harness.fake.replays.empty(), "one question, however much comes behind the gap"
    again = FakeRequest(harness.fake, request.message)
    await again.say("abcd", num_tokens=4)
    await again.say("e")
    await again.finish()
    events = await events_of(response)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "abcde"


async def test_a_gap_that_stays_is_asked_for_less_and_less_often(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    request.piece("lost on its way")
    await request.say("b")
    await harness.settle()
    await harness.advance(60.0)
    assert 4 <= harness.fake.replays.qsize() <= 7
    await harness.advance(61.0)
    assert_ended_once(await events_of(response), error="stalled")


async def test_a_lost_end_is_asked_for_and_told_once(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.close(Outcome.COMPLETED)
    await harness.settle()
    await harness.advance(0.25)
    await harness.fake.next_replay()
    again = FakeRequest(harness.fake, request.message)
    await again.say("ab", num_tokens=2)
    await again.finish()
    events = await events_of(response)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "ab"
    await harness.nothing_is_left()


async def test_an_end_that_comes_again_and_again_without_its_text_fails_the_request(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    for _ in range(5):
        await request.close(Outcome.COMPLETED)
        await harness.advance(1.0)
    assert_ended_once(await events_of(response), error="unavailable")
    await harness.nothing_is_left()


async def test_a_silent_request_has_its_scheduler_asked_after_longer_and_longer_pauses(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    await harness.settle()
    await harness.advance(1.5)
    assert harness.fake.replays.empty()
    await harness.advance(59.0)
    assert harness.fake.replays.qsize() == 5, "after 2, 4, 8, 16 and 30 seconds"
    assert (await harness.fake.next_replay()).num_tokens == (0,)
    await request.complete("a")
    assert (await asking)[0] == 200


async def test_choice_that_was_not_asked_for_fails_the_request(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    other = FakeRequest(harness.fake, request.message)
    other._num_tokens, other._num_chars = [0, 0], [0, 0]
    await other.say("x", index=1)
    assert (await asking)[0] == 503
    assert await harness.fake.next_cancellation() == request.request_id


# Nobody answers.


async def test_submission_is_repeated_until_somebody_answers(harness: Harness) -> None:
    asking, first = await harness.start_chat()
    await harness.advance(1.5)
    assert harness.fake.submissions.empty()
    await harness.advance(0.5)
    second = await harness.fake.next_request()
    assert second.message == first.message
    await second.complete("a")
    assert (await asking)[0] == 200
    await harness.advance(10.0)
    assert harness.fake.submissions.empty()


async def test_submission_that_nobody_takes_fails_in_the_end(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.advance(8.5)
    assert harness.fake.submissions.qsize() == 3
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert await harness.fake.next_cancellation() == request.request_id
    await harness.advance(6.0)
    await harness.nothing_is_left()


async def test_publishing_that_fails_is_repeated_too(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise Disconnected("the buffer for unsent messages is full")

    with monkeypatch.context() as patch:
        patch.setattr(harness.transport, "publish", refuse)
        asking = asyncio.create_task(harness.chat())
        await harness.until(lambda: len(harness.mesh.requests) == 1)
        await harness.settle()
    assert harness.fake.submissions.empty()
    await harness.advance(2.0)
    await (await harness.fake.next_request()).complete("a")
    assert (await asking)[0] == 200


async def test_stall_after_the_first_token_is_a_504(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.settle()
    await harness.advance(119.0)
    await request.say("b")
    await harness.advance(119.0)
    assert len(harness.mesh.requests) == 1
    await harness.advance(1.5)
    assert_ended_once(await events_of(response), error="stalled")
    assert await harness.fake.next_cancellation() == request.request_id


async def test_waiting_for_the_first_token_has_its_own_limit(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    await harness.advance(599.0)
    assert not asking.done()
    await harness.advance(1.5)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (504, "stalled")
    assert await harness.fake.next_cancellation() == request.request_id


async def test_silence_is_bridged_by_comments(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await harness.advance(14.0)
    await request.say("a")
    await harness.settle()
    await harness.advance(14.0)
    await harness.advance(1.5)
    await harness.advance(15.0)
    await request.finish()
    text = await response.text()
    assert text.count(": keep-alive\n\n") == 2
    assert text.index('"a"') < text.index(": keep-alive")
