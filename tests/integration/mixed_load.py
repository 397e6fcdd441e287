"""Requests that end in every way there is, and clients that keep an account of their own of what came of them."""

import asyncio
from collections import Counter
from typing import Any

import aiohttp

from tests.integration.cast import Streamed, create, follow
from tests.integration.in_process import MODEL, InProcessMesh

TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
PATIENCE_S = 60.0
OUTPUT: dict[str, Any] = {"prompt": TEXT, "max_tokens": 100, "ignore_eos": True}
GREEDY: dict[str, Any] = OUTPUT | {"temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who counts the sacks?"}], "max_tokens": 40}

Ending = tuple[str, str, str]
"""Operation, ending and code."""


class Client:
    """Asks for output over one WebSocket, and keeps its own account of what came of it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.endings: Counter[Ending] = Counter()
        self.num_tokens = 0
        """Received, or told of at the end."""
        self.num_completed_tokens = 0
        """Of these, of requests that completed."""
        self._socket = socket
        self._operations: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._received: Counter[str] = Counter()
        self._news: dict[str, asyncio.Event] = {}

    async def ask(self, name: str, body: dict[str, Any]) -> None:
        """Begin a request."""
        self._operations[name] = "chat" if "messages" in body else "text_completion"
        self._news[name] = asyncio.Event()
        await self._socket.send_json(
            {"type": "request.create", "id": name, "token_ids": True, "body": {"model": MODEL, **body}}
        )

    async def cancel(self, name: str) -> None:
        """Stop one."""
        await self._socket.send_json({"type": "request.cancel", "id": name})

    async def until_it_speaks(self, name: str) -> None:
        """Return when something of a request has come. `read_to_the_end` is to be running."""
        await asyncio.wait_for(self._news[name].wait(), PATIENCE_S)

    async def read_to_the_end(self) -> None:
        """Take in what comes until everything that was asked for has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while self._operations:
                self._take(await self._socket.receive_json())

    def _take(self, message: dict[str, Any]) -> None:
        kind, request_id = message["type"], message.get("request_id", "")
        name = message.get("id") or self._names.get(request_id, "")
        if kind == "request.accepted":
            self._names[request_id] = name
        elif kind == "request.delta":
            self._received[name] += len(message["token_ids"])
            self._news[name].set()
        else:
            self._ended(name, kind.removeprefix("request."), message)

    def _ended(self, name: str, ending: str, message: dict[str, Any]) -> None:
        usage = message.get("usage")
        num_tokens = usage["completion_tokens"] if usage else self._received[name]
        self.num_tokens += num_tokens
        self.num_completed_tokens += num_tokens * (ending == "completed")
        was_accepted = name in self._names.values()
        if ending == "failed" and not was_accepted:
            ending = "refused"
        self.endings[self._operations.pop(name), ending, message.get("error", {}).get("code", "")] += 1


async def stops(mesh: InProcessMesh) -> list[str]:
    """Strings that the model says in the middle of its answer to GREEDY."""
    (free,) = await mesh.stream_all([GREEDY])
    return [free.text[0][place : place + 4] for place in (10, 40)]


async def refused_at_the_door(mesh: InProcessMesh) -> Counter[Ending]:
    """Requests that never come in, each for another reason."""
    requests: list[tuple[str, dict[str, Any], str]] = [
        ("chat", CHAT | {"temperature": 9}, "invalid_value"),
        ("chat", CHAT | {"no_such_field": 1}, "unsupported_field"),
        ("text_completion", OUTPUT | {"model": "other"}, "model_not_found"),
        ("text_completion", OUTPUT | {"prompt": "x" * (100 << 10)}, "request_too_large"),
        ("text_completion", OUTPUT | {"priority": -1}, "not_allowed"),
    ]
    paths = {"chat": "/v1/chat/completions", "text_completion": "/v1/completions"}
    await mesh.until_models_are_known()
    for operation, body, code in requests:
        async with mesh.session.post(mesh.url + paths[operation], json={"model": MODEL, **body}) as answer:
            assert (await answer.json())["error"]["code"] == code
    return Counter((operation, "refused", code) for operation, _, code in requests)


async def leave_in_mid_stream(mesh: InProcessMesh, **body: Any) -> None:
    """A client over HTTP that goes away after the first words."""
    wanted = {"model": MODEL, **OUTPUT, **body, "max_tokens": 500, "stream": True}
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=wanted) as answer:
        assert await answer.content.readline()
        answer.close()


async def mixed_load(mesh: InProcessMesh, client: Client, stop: list[str]) -> None:
    """Requests that end in every way there is, most of them at once."""
    reading = asyncio.create_task(client.read_to_the_end())
    await client.ask("slow", OUTPUT | {"max_tokens": 600, "timeout_ms": 700})
    await client.ask("early", OUTPUT | {"max_tokens": 500})
    await client.cancel("early")
    for number in range(12):
        await client.ask(f"plain {number}", OUTPUT | {"seed": number, "n": 1 + number % 3})
        await client.ask(f"chat {number}", CHAT | {"seed": number, "logprobs": True, "top_logprobs": 2})
    for number, text in enumerate(stop):
        await client.ask(f"stop {number}", GREEDY | {"stop": [text, "\x00never"]})
        await client.ask(f"stops {number}", GREEDY | {"stop": [text], "n": 2, "prompt": TEXT})
    for number in range(3):
        await client.ask(f"cancelled {number}", OUTPUT | {"seed": number, "max_tokens": 500})
    await client.ask("too long", OUTPUT | {"prompt": TEXT * 200})
    await client.ask("too much", OUTPUT | {"max_tokens": 100_000})
    await client.ask("late at once", OUTPUT | {"max_tokens": 500, "timeout_ms": 1})
    for number in range(3):
        await client.until_it_speaks(f"cancelled {number}")
        await client.cancel(f"cancelled {number}")
    await leave_in_mid_stream(mesh)
    await reading


async def flood(client: Client) -> None:
    """More requests than may wait."""
    for number in range(60):
        await client.ask(f"flood {number}", OUTPUT | {"seed": number, "max_tokens": 8})
    await client.read_to_the_end()


async def resume_in_the_middle(mesh: InProcessMesh) -> int:
    """A client whose connection breaks and who comes back; the number of its tokens."""
    stream, body = Streamed(), OUTPUT | {"max_tokens": 300}
    async with mesh.session.ws_connect(f"{mesh.url}/v1/stream") as socket:
        await socket.send_json(create(0, body))
        with_some = asyncio.create_task(follow(socket, [stream]))
        async with asyncio.timeout(PATIENCE_S):
            while stream.num_tokens < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        with_some.cancel()
        assert socket._response.connection is not None
        assert socket._response.connection.transport is not None
        socket._response.connection.transport.abort()
    async with mesh.session.ws_connect(f"{mesh.url}/v1/stream") as socket:
        again = {"type": "request.resume", "id": "0", "request_id": stream.request_id}
        await socket.send_json(again | {"offset": len(stream.text[0]), "token_offset": stream.num_tokens})
        await follow(socket, [stream])
    assert stream.num_tokens == 300
    return 300
