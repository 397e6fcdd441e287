"""Resuming over HTTP: the rest of a stream as events, in the shape that it was asked for in."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from shared.errors import InvalidRequest
from shared.messages import ErrorInfo, Outcome
from tests.gateway.fake_mesh import PATIENCE_S, FakeRequest, logprobs_of
from tests.gateway.harness import (
    CHAT,
    COMPLETION,
    Harness,
    assert_ended_once,
    events_of,
    next_event,
    running_gateway,
    text_of,
)
from tests.gateway.peers import connected
from tests.resets import reset

RESUMABLE = {"resumable": True}


def vanish(response: aiohttp.ClientResponse) -> None:
    """The client's machine is gone."""
    assert response.connection is not None
    reset(response.connection.transport)


async def left_behind(
    harness: Harness, *texts: str, body: Any = CHAT, path: str = "/v1/chat/completions"
) -> FakeRequest:
    """A stream that has said `texts` to a client that then vanished."""
    response, request = await harness.open_stream(body | RESUMABLE, path)
    assert response.headers["X-Request-Id"] == request.request_id
    harness.fake.keep(request)
    for text in texts:
        await request.say(text)
    await harness.settle()
    vanish(response)
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    return request


async def get(harness: Harness, request: FakeRequest | str, query: str = "", **options: Any) -> aiohttp.ClientResponse:
    request_id = request if isinstance(request, str) else request.request_id
    return await harness.http.get(f"{harness.url}/v1/requests/{request_id}/stream{query}", **options)


async def refusal(harness: Harness, request: FakeRequest | str, query: str = "", **options: Any) -> tuple[int, Any]:
    async with await get(harness, request, query, **options) as response:
        return response.status, (await response.json())["error"]


async def not_found(harness: Harness, request: FakeRequest | str) -> tuple[int, Any]:
    """The refusal of what no scheduler says to have."""
    asking = asyncio.create_task(refusal(harness, request))
    await harness.fake.next_search()
    await harness.advance(1.5)
    return await asking


# Going on.


async def test_stream_outlives_its_connection_and_goes_on_from_the_offset(harness: Harness) -> None:
    request = await left_behind(harness, "Hel")
    await request.say("lo")
    async with await get(harness, request, "?offset=3") as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        assert response.headers["X-Request-Id"] == request.request_id
        opening = json.loads(await next_event(response))
        assert opening["object"] == "chat.completion.chunk"
        assert opening["id"] == "chatcmpl-" + request.request_id.removeprefix("req-")
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert json.loads(await next_event(response))["choices"][0]["delta"] == {"content": "lo"}
        await request.say(", world")
        await request.finish()
        events = await events_of(response)
        assert_ended_once(events, reason="stop")
        assert text_of(events) == ", world"
    assert harness.fake.cancellations.empty()
    await harness.nothing_is_left()


async def test_shape_and_creation_are_those_of_the_first_answer(harness: Harness) -> None:
    body = COMPLETION | {"stream_options": {"include_usage": True}}
    response, request = await harness.open_stream(body | RESUMABLE, "/v1/completions")
    harness.fake.keep(request)
    await request.say("Hel")
    first = json.loads(await next_event(response))
    vanish(response)
    await request.finish()
    await harness.settle()
    async with await get(harness, request) as resumed:
        events = [json.loads(event) for event in (await events_of(resumed))[:-1]]
    assert (events[0]["id"], events[0]["created"], events[0]["object"]) == (
        first["id"],
        first["created"],
        first["object"],
    )
    assert events[0]["choices"][0]["text"] == first["choices"][0]["text"] == "Hel"
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 1


async def test_nothing_that_the_client_has_makes_an_empty_chunk(harness: Harness) -> None:
    request = await left_behind(harness, "Hello", body=COMPLETION, path="/v1/completions")
    await request.finish()
    async with await get(harness, request, "?offset=5") as response:
        events = await events_of(response)
    assert len(events) == 2, "the finish reason, and [DONE]"
    assert_ended_once(events, reason="stop")


async def test_columns_of_logprobs_go_on_where_they_were(harness: Harness) -> None:
    body = COMPLETION | {"logprobs": 0}
    response, request = await harness.open_stream(body | RESUMABLE, "/v1/completions")
    harness.fake.keep(request)
    await request.say("Hé", num_tokens=2, logprobs=[logprobs_of("H"), logprobs_of("é")])
    await next_event(response)
    vanish(response)
    await harness.until(lambda: harness.mesh.num_disconnects == 1)
    await request.say("llo", num_tokens=2, logprobs=[logprobs_of("ll"), logprobs_of("o")])
    await request.finish()
    for query, tokens, offsets in (
        ("?offset=2&token_offset=2", ["ll", "o"], [2, 4]),
        ("?offset=2", ["H", "é", "ll", "o"], [0, 1, 2, 4]),
    ):
        async with await get(harness, request, query) as resumed:
            choice = json.loads(await next_event(resumed))["choices"][0]
            assert choice["text"] == "llo"
            assert (choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]) == (tokens, offsets)


async def test_logprobs_whose_text_the_client_has_are_told_in_a_chunk_without_text(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"logprobs": True} | RESUMABLE)
    await request.say("Hello", logprobs=[logprobs_of("Hello")])
    await harness.settle()
    vanish(response)
    async with await get(harness, request, "?offset=5") as resumed:
        await next_event(resumed)
        choice = json.loads(await next_event(resumed))["choices"][0]
        assert choice["delta"] == {}
        assert [position["token"] for position in choice["logprobs"]["content"]] == ["Hello"]


async def test_every_choice_has_its_own_offset(harness: Harness) -> None:
    request = await left_behind(harness, "Hel", body=CHAT | {"n": 2})
    await request.say("other", index=1)
    await request.finish()
    async with await get(harness, request, "?offset=3,2") as response:
        assert text_of(await events_of(response)) == "her"


async def test_request_is_resumed_after_its_end(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | RESUMABLE)
    harness.fake.keep(request)
    await request.say("Hello")
    await request.finish()
    assert_ended_once(await events_of(response), reason="stop")
    async with await get(harness, request, "?offset=1") as resumed:
        events = await events_of(resumed)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "ello"


async def test_failure_is_an_event_after_the_rest_of_the_text(harness: Harness) -> None:
    request = await left_behind(harness, "Hel")
    await request.say("lo")
    await request.close(Outcome.FAILED, ErrorInfo.of(InvalidRequest("No.")))
    async with await get(harness, request, "?offset=3") as response:
        events = await events_of(response)
    assert_ended_once(events, error="invalid_value")
    assert text_of(events) == "lo"


async def test_what_began_on_a_websocket_goes_on_over_http_and_back(harness: Harness) -> None:
    async with connected(harness) as peer, connected(harness) as other:
        request = await peer.create(harness)
        await request.say("Hel")
        assert (await peer.receive())["text"] == "Hel"
        async with await get(harness, request, "?offset=3") as response:
            assert (await peer.receive())["error"]["code"] == "resumed_elsewhere"
            await request.say("lo")
            await next_event(response)
            assert json.loads(await next_event(response))["choices"][0]["delta"] == {"content": "lo"}
            await other.send({"type": "request.resume", "request_id": request.request_id, "offset": 4})
            assert_ended_once(await events_of(response), error="resumed_elsewhere")
        assert (await other.receive())["type"] == "request.accepted"
        assert (await other.receive())["text"] == "o"
        await request.finish()
        assert (await other.receive())["type"] == "request.completed"
    assert harness.fake.cancellations.empty()


# What ends a request and what does not.


async def test_stream_that_is_not_to_be_resumable_ends_with_its_connection(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("Hel")
    await harness.settle()
    vanish(response)
    assert await harness.fake.next_cancellation() == request.request_id
    assert not request.message.client, "so no scheduler gives it away"
    assert (await not_found(harness, request))[0] == 404


async def test_resumed_stream_outlives_its_connection_too(harness: Harness) -> None:
    request = await left_behind(harness, "Hel")
    response = await get(harness, request, "?offset=3")
    vanish(response)
    await harness.until(lambda: harness.mesh.num_disconnects == 2)
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(1.5)
    assert await harness.fake.next_cancellation() == request.request_id


async def test_leaving_gateway_breaks_off_at_once_what_goes_on_elsewhere(harness: Harness) -> None:
    runner = harness.gateway.server._runner
    assert runner is not None
    runner._shutdown_timeout = 3600.0  # for so long it would wait for a connection that nobody closes
    request = await left_behind(harness, "Hel")
    async with await get(harness, request, "?offset=3") as response:
        await next_event(response)
        async with asyncio.timeout(PATIENCE_S):
            await harness.gateway.on_stop()
        with pytest.raises(aiohttp.ClientError):
            await next_event(response)
    assert harness.fake.cancellations.empty(), "other gateways may take it over"


async def test_client_that_never_heard_the_id_leaves_nothing(harness: Harness) -> None:
    body = CHAT | RESUMABLE | {"stream": True}
    asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/chat/completions", json=body))
    request = await harness.fake.next_request()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await harness.fake.next_cancellation() == request.request_id


# Refusals.


async def test_unknown_request_is_a_404(harness: Harness) -> None:
    status, error = await not_found(harness, "req-unknown")
    assert (status, error["code"], error["param"]) == (404, "not_found", "request_id")


async def test_only_the_same_key_may_resume() -> None:
    async with running_gateway(api_keys=("acme:one", "acme:two")) as harness:
        owner = {"Authorization": "Bearer one"}
        body = CHAT | RESUMABLE | {"stream": True}
        asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/chat/completions", json=body, headers=owner))
        request = await harness.fake.next_request()
        await request.accept()
        await request.say("mine")
        async with await asking as response:
            for key, status in (("two", 404), ("three", 401)):
                other = {"Authorization": f"Bearer {key}"}
                assert (await refusal(harness, request, headers=other))[0] == status
            assert (await refusal(harness, request))[0] == 401
            await request.finish()
            assert_ended_once(await events_of(response), reason="stop")
        harness.fake.keep(request)
        async with await get(harness, request, headers=owner) as resumed:
            assert text_of(await events_of(resumed)) == "mine"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?offset=6", "offset"),
        ("?offset=-1", "offset"),
        ("?offset=x", "offset"),
        ("?offset=99999999999", "offset"),
        ("?offset=9999999999", "offset"),
        ("?offset=1,2", "offset"),
        ("?token_offset=2", "token_offset"),
        ("?ofset=1", "ofset"),
    ],
)
async def test_bad_offset_is_a_400_that_names_it_and_ends_nothing(harness: Harness, query: str, param: str) -> None:
    request = await left_behind(harness, "Hello")
    status, error = await refusal(harness, request, query)
    assert (status, error["param"]) == (400, param)
    await harness.settle()
    assert harness.fake.cancellations.empty()
    async with await get(harness, request, "?offset=5") as response:
        assert response.status == 200


async def test_resumable_makes_no_sense_for_an_answer_in_one_piece(harness: Harness) -> None:
    status, answer = await harness.chat(resumable=True)
    assert (status, answer["error"]["param"]) == (400, "resumable")


async def test_path_is_for_reading(harness: Harness) -> None:
    async with harness.post("/v1/requests/req-1/stream", {}) as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET")
