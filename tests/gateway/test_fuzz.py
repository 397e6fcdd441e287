"""Whatever a client sends, it is answered, with a 4xx if need be, and the gateway lives."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.bodies import UNSUPPORTED, GenerationBody
from services.gateway.chat import ChatBody
from services.gateway.completions import CompletionBody
from tests.gateway.fake_mesh import MODEL, PATIENCE_S
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway

LOOP = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([0, 1, -1, 2**31, 2**63, -(2**63), 10**25, 1e308, "", "\x00", "text", "none", MODEL])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("type"), inner, max_size=3)
    ),
    max_leaves=8,
)
fields = sorted(
    {*GenerationBody.__struct_fields__, *ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *UNSUPPORTED}
)
roles = st.sampled_from(["user", "assistant", "system", "tool"]) | values
turns = st.lists(st.fixed_dictionaries({"role": roles, "content": values}), max_size=3)
bodies = st.dictionaries(st.sampled_from(fields) | st.text(max_size=8), values, max_size=4).flatmap(
    lambda odd: st.sampled_from([CHAT | odd, COMPLETION | odd, odd])
) | st.builds(lambda messages: CHAT | {"messages": messages}, turns)


@pytest.fixture
async def obliging() -> AsyncIterator[Harness]:
    """A gateway whose mesh completes whatever it is given."""
    async with running_gateway() as harness:

        async def oblige() -> None:
            while True:
                request = await harness.fake.submissions.get()
                await request.complete("x")

        obliging = asyncio.create_task(oblige())
        yield harness
        obliging.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await obliging


async def check(harness: Harness, path: str, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with asyncio.timeout(PATIENCE_S):
        async with harness.http.post(harness.url + path, data=data, headers=headers) as response:
            body = await response.read()
    assert response.status == 200 or 400 <= response.status < 500, body
    if response.status != 200:
        error = json.loads(body)["error"]
        assert error["message"]
        assert error["code"]
        assert error["param"] is None or isinstance(error["param"], str)
    elif response.content_type == "text/event-stream":
        assert body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in body


@LOOP
@given(body=bodies, path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]))
async def test_any_body_of_a_generation_request(obliging: Harness, body: dict[str, Any], path: str) -> None:
    await check(obliging, path, json.dumps(body).encode("utf-8", "surrogatepass"))


@LOOP
@given(data=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
async def test_any_bytes(obliging: Harness, data: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        await check(obliging, path, data)


questions = st.dictionaries(st.sampled_from(["model", "prompt", "messages", "tokens"]), values)


@LOOP
@given(body=questions.filter(lambda body: body.get("model") != MODEL))  # nobody would answer it
async def test_any_body_of_a_question(obliging: Harness, body: dict[str, Any]) -> None:
    for path in ("/tokenize", "/detokenize"):
        await check(obliging, path, json.dumps(body).encode("utf-8", "surrogatepass"))


messages = values | st.fixed_dictionaries(
    {"type": st.sampled_from(["request.create", "request.cancel", "request.resume", "ping"])},
    optional={"id": st.text(max_size=3) | values, "request_id": values, "body": bodies, "offset": values},
)


@pytest.mark.parametrize("protocol", ["shoal.v1.json", "shoal.v1.msgpack"])
@LOOP
@given(sent=st.lists(messages, max_size=5), garbage=st.binary(max_size=20) | st.text(max_size=20))
async def test_any_message_on_a_socket(obliging: Harness, protocol: str, sent: list[Any], garbage: bytes | str) -> None:
    async with obliging.http.ws_connect(obliging.url + "/v1/stream", protocols=[protocol]) as socket:
        for message in sent:
            with contextlib.suppress(OverflowError, UnicodeEncodeError):
                await send(socket, message)
        if protocol == "shoal.v1.json":
            await socket.send_str(garbage if isinstance(garbage, str) else garbage.decode("latin-1"))
        else:
            await socket.send_bytes(garbage if isinstance(garbage, bytes) else garbage.encode("utf-8", "surrogatepass"))
        await send(socket, {"type": "request.cancel", "id": "the end"})
        async with asyncio.timeout(PATIENCE_S):
            while not await says_the_end(socket):
                pass


async def send(socket: aiohttp.ClientWebSocketResponse, message: Any) -> None:
    if socket.protocol == "shoal.v1.json":
        await socket.send_str(json.dumps(message))
    else:
        await socket.send_bytes(msgpack.packb(message))


async def says_the_end(socket: aiohttp.ClientWebSocketResponse) -> bool:
    frame = await socket.receive()
    message = json.loads(frame.data) if socket.protocol == "shoal.v1.json" else msgpack.unpackb(frame.data)
    assert message["type"].startswith("request.") or message["type"] in ("pong", "error")
    return (
        message["type"] == "error"
        and "No such request" in message["error"]["message"]
        and message["error"]["param"] == "id"
    )
