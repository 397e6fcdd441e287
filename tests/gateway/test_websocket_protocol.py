"""Opening and ending a WebSocket, and messages on it that make no sense."""

import asyncio
from typing import Any

import aiohttp
import pytest

from shared.errors import InvalidRequest
from shared.messages import ErrorInfo
from tests.gateway.fake_mesh import PATIENCE_S
from tests.gateway.harness import CHAT, Harness, running_gateway
from tests.gateway.peers import PATH, Peer, connected

# Messages that make no sense.


@pytest.mark.parametrize(
    ("message", "param", "sentence"),
    [
        ({}, "type", "type is missing"),
        ({"type": "dance"}, "type", "type must be one of request.create"),
        ({"type": 5}, "type", "type must be one of"),
        ({"type": "request.create"}, "id", "id is missing"),
        ({"type": "request.create", "id": 5, "body": {}}, "id", "id must be a string"),
        ({"type": "request.create", "id": "a"}, "body", "body is missing"),
        ({"type": "request.create", "id": "a", "body": []}, "body", "body must be an object"),
        ({"type": "request.create", "id": "a", "body": {}, "x": 1}, "x", "x is an unknown field"),
        ({"type": "request.cancel"}, "request_id", "either request_id or id"),
        ({"type": "request.cancel", "id": "a", "request_id": "b"}, "request_id", "either request_id or id"),
        ({"type": "request.cancel", "id": "nobody"}, "id", "No such request"),
        ({"type": "ping", "x": 1}, "x", "unknown field"),
        ([], None, "must be an object"),
        ("text", None, "must be an object"),
    ],
)
async def test_message_without_sense_is_an_error_and_the_socket_goes_on(
    harness: Harness, peer: Peer, message: Any, param: str | None, sentence: str
) -> None:
    await peer.send(message)
    answer = await peer.receive()
    assert (answer["type"], answer["error"]["param"]) == ("error", param)
    assert sentence in answer["error"]["message"]
    await peer.create(harness)


@pytest.mark.parametrize(
    "data", ["", "{", "nope", "[" * 50_000, '{"type": "ping"} x', '{"a": "\\ud800"}', '{"a": 1e999}']
)
async def test_text_that_is_no_json_is_an_error_and_the_socket_goes_on(harness: Harness, data: str) -> None:
    async with connected(harness) as peer:
        await peer.socket.send_str(data)
        answer = await peer.receive()
        assert (answer["type"], answer["error"]["code"]) == ("error", "invalid_value")
        await peer.create(harness)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type", b"\xa1\xff", b"\x91" * 50_000])
async def test_bytes_that_are_no_msgpack_are_an_error_and_the_socket_goes_on(harness: Harness, data: bytes) -> None:
    async with connected(harness, "shoal.v1.msgpack") as peer:
        await peer.socket.send_bytes(data)
        answer = await peer.receive()
        assert (answer["type"], answer["error"]["code"]) == ("error", "invalid_value")
        await peer.create(harness)


# Opening and leaving.


async def test_json_is_spoken_when_nothing_is_offered(harness: Harness) -> None:
    async with connected(harness) as peer:
        assert peer.socket.protocol is None
        await peer.create(harness)


async def test_first_known_subprotocol_is_taken(harness: Harness) -> None:
    async with connected(harness, "other", "shoal.v1.msgpack", "shoal.v1.json") as peer:
        assert peer.socket.protocol == "shoal.v1.msgpack"


async def test_unknown_subprotocols_are_refused(harness: Harness) -> None:
    for protocols in (["other"], ["shoal.key.abc"]):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await harness.http.ws_connect(harness.url + PATH, protocols=protocols)
        assert caught.value.status == 400


async def test_path_is_for_websockets_only(harness: Harness) -> None:
    async with harness.http.get(harness.url + PATH) as response:
        assert response.status == 400
        assert "WebSocket" in (await response.json())["error"]["message"]


async def test_key_comes_in_a_header_or_as_a_subprotocol() -> None:
    async with running_gateway(api_keys=("acme:secret",)) as harness:
        for protocols, headers in (
            (["shoal.v1.json"], {"Authorization": "Bearer secret"}),
            (["shoal.v1.json", "shoal.key.secret"], {}),
        ):
            async with connected(harness, *protocols, headers=headers) as peer:
                assert peer.socket.protocol == "shoal.v1.json"
                request = await peer.create(harness)
                assert request.message.tenant == "acme"
        for protocols in (["shoal.v1.json"], ["shoal.v1.json", "shoal.key.wrong"]):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await harness.http.ws_connect(harness.url + PATH, protocols=protocols)
            assert caught.value.status == 401


async def test_one_connection_cannot_cancel_anothers_request(harness: Harness) -> None:
    async with connected(harness) as one, connected(harness) as other:
        request = await one.create(harness)
        await other.send({"type": "request.cancel", "request_id": request.request_id})
        assert (await other.receive())["error"]["code"] == "not_found"
        await request.finish()
        assert (await one.receive())["type"] == "request.completed"


async def test_draining_gateway_says_so_and_finishes_what_runs(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    harness.gateway.drain(10.0)
    assert await peer.receive() == {"type": "going_away", "deadline_ms": 10_000}
    await peer.send({"type": "request.create", "id": "b", "body": CHAT})
    failed = await peer.receive()
    assert (failed["type"], failed["id"], failed["error"]["code"]) == ("request.failed", "b", "unavailable")
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await harness.http.ws_connect(harness.url + PATH)
    assert caught.value.status == 503
    await request.say("the end")
    await request.finish()
    assert (await peer.receive())["text"] == "the end"
    assert (await peer.receive())["type"] == "request.completed"
    await asyncio.wait_for(harness.running, PATIENCE_S)


async def test_leaving_gateway_fails_what_cannot_be_resumed_and_closes(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness, body=CHAT | {"resumable": False})
    stopping = asyncio.create_task(harness.gateway.on_stop())
    failed = await peer.receive()
    assert (failed["type"], failed["request_id"]) == ("request.failed", request.request_id)
    assert await peer.closed() == 1012
    await stopping
    assert await harness.fake.next_cancellation() == request.request_id


async def test_leaving_gateway_leaves_the_rest_to_be_resumed_elsewhere(harness: Harness, peer: Peer) -> None:
    request = await peer.create(harness)
    await request.say("so far")
    assert (await peer.receive())["text"] == "so far"
    stopping = asyncio.create_task(harness.gateway.on_stop())
    assert await peer.closed() == 1012
    await stopping
    await harness.settle()
    assert harness.fake.cancellations.empty()


async def test_usage_is_null_when_the_mesh_never_said(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT})
    request = await harness.fake.next_request()
    await peer.send({"type": "request.cancel", "id": "a"})
    await harness.fake.next_cancellation()
    await request.refuse(ErrorInfo.of(InvalidRequest("Late.")))
    assert (await peer.receive())["usage"] is None
