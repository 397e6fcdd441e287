"""A request whose `timeout_ms` is over: what its client gets, wherever the request was."""

import asyncio
import json
from typing import Any

import openai
import pytest

from shared.errors import DeadlineExceeded
from shared.messages import ErrorInfo, Outcome
from tests.gateway.fake_mesh import MODEL, PATIENCE_S
from tests.gateway.harness import CHAT, CHAT_PATH, COMPLETION, Harness, assert_ended_once, events_of, text_of
from tests.gateway.peers import Peer

LATE = ErrorInfo.of(DeadlineExceeded("the request's timeout_ms is over"))
CODE = "deadline_exceeded"
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 1,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 2},
}


async def answer_of(harness: Harness, body: dict[str, Any], path: str = CHAT_PATH) -> tuple[int, Any, str | None]:
    async with harness.post(path, body) as response:
        return response.status, await response.json(), response.headers.get("X-Should-Retry")


@pytest.mark.parametrize("text", ["", "some text"])
@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), ("/v1/completions", COMPLETION)])
async def test_whole_answer_that_is_late_is_a_504_in_the_queue_and_in_mid_output(
    harness: Harness, path: str, body: dict[str, Any], text: str
) -> None:
    asking = asyncio.create_task(answer_of(harness, body | {"timeout_ms": 500}, path))
    request = await harness.fake.next_request()
    await request.accept()
    if text:
        await request.say(text)
    await request.close(Outcome.FAILED, LATE)
    status, answer, should_retry = await asking
    assert status == 504
    assert answer["error"] == {"message": LATE.message, "type": "timeout_error", "param": None, "code": CODE}
    assert should_retry == "false"
    await harness.nothing_is_left()


async def test_stream_that_is_late_in_the_queue_ends_in_an_error_event(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"timeout_ms": 500})
    await request.close(Outcome.FAILED, LATE)
    events = await events_of(response)
    assert_ended_once(events, error=CODE)
    assert text_of(events) == ""


async def test_stream_that_is_late_in_mid_output_has_the_text_until_then(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"timeout_ms": 500})
    await request.say("until")
    await request.say(" then")
    await request.close(Outcome.FAILED, LATE)
    events = await events_of(response)
    assert_ended_once(events, error=CODE)
    assert text_of(events) == "until then"
    await harness.nothing_is_left()


@pytest.mark.parametrize("text", ["", "until then"])
async def test_request_on_a_socket_that_is_late_fails_after_its_text(harness: Harness, peer: Peer, text: str) -> None:
    request = await peer.create(harness, body=CHAT | {"timeout_ms": 500})
    if text:
        await request.say(text)
    await request.close(Outcome.FAILED, LATE)
    if text:
        assert (await peer.receive())["text"] == text
    failed = await peer.receive()
    assert (failed["type"], failed["request_id"]) == ("request.failed", request.request_id)
    assert (failed["error"]["type"], failed["error"]["code"]) == ("timeout_error", CODE)
    assert "retry_after_s" not in failed
    assert failed.get("usage") == (USAGE if text else None), "what it has consumed, if it got something for it"


async def test_request_on_a_socket_that_the_mesh_does_not_end_has_consumed_what_was_delivered(
    harness: Harness, peer: Peer
) -> None:
    request = await peer.create(harness, body=CHAT | {"timeout_ms": 500})
    await request.say("until then")
    assert (await peer.receive())["text"] == "until then"
    await harness.advance(2.0)
    failed = await peer.receive()
    assert failed["error"]["code"] == CODE
    assert failed["usage"] == USAGE | {"prompt_tokens_details": {"cached_tokens": 0}}, "but for what nobody said"


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_stream_that_is_late_tells_what_it_consumed_if_its_client_wants_to_know(
    harness: Harness, wants_usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    response, request = await harness.open_stream(CHAT | options | {"timeout_ms": 500})
    await request.say("until then")
    await request.close(Outcome.FAILED, LATE)
    events = await events_of(response)
    assert_ended_once(events, error=CODE)
    assert json.loads(events[-2]).get("usage") == (USAGE if wants_usage else None)


@pytest.mark.parametrize("is_accepted", [False, True])
async def test_mesh_that_says_nothing_does_not_hold_a_client_beyond_its_time(
    harness: Harness, is_accepted: bool
) -> None:
    asking = asyncio.create_task(answer_of(harness, CHAT | {"timeout_ms": 500}))
    request = await harness.fake.next_request()
    if is_accepted:
        await request.accept()
    await harness.advance(1.4)
    assert not asking.done()
    await harness.advance(0.5)
    status, answer, _ = await asking
    assert (status, answer["error"]["code"]) == (504, CODE)
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert harness.mesh.requests.num_ended == {Outcome.FAILED: 1}


async def test_one_late_prompt_of_several_ends_the_others(harness: Harness) -> None:
    asking = asyncio.create_task(answer_of(harness, COMPLETION | {"prompt": ["a", "b"]}, "/v1/completions"))
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    await first.accept()
    await second.accept()
    await first.close(Outcome.FAILED, LATE)
    assert (await asking)[0] == 504
    assert await harness.fake.next_cancellation() == second.request_id


async def test_openais_client_does_not_repeat_what_was_late(harness: Harness) -> None:
    async with harness.openai() as client:
        asking = asyncio.create_task(
            client.with_options(max_retries=2).chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"timeout_ms": 500}
            )
        )
        request = await harness.fake.next_request()
        await request.close(Outcome.FAILED, LATE)
        with pytest.raises(openai.InternalServerError) as caught:
            await asyncio.wait_for(asking, PATIENCE_S)
    assert caught.value.code == CODE
    assert harness.fake.submissions.empty()
