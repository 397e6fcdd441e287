"""The listener for scrapers and probes: it answers GET on a few paths, whatever its peers do."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus

import pytest

from shared.telemetry import exposition
from shared.telemetry.exposition import Answer, Listener

PATIENCE_S = 30.0


class Routes:
    """A path that repeats a header, one that waits to be let go, and one with a bug."""

    def __init__(self) -> None:
        self.has_asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def echo(self, headers: Mapping[str, str]) -> Answer:
        return Answer(headers.get("x-word", "").encode(), "text/x-word", HTTPStatus.OK)

    async def wait(self, headers: Mapping[str, str]) -> Answer:
        self.has_asked.set()
        await self.may_answer.wait()
        return Answer(b"at last")

    async def fail(self, headers: Mapping[str, str]) -> Answer:
        raise ZeroDivisionError("a bug")


@pytest.fixture
def routes() -> Routes:
    return Routes()


@pytest.fixture
async def listener(routes: Routes) -> AsyncIterator[Listener]:
    listener = Listener({"/echo": routes.echo, "/wait": routes.wait, "/fail": routes.fail})
    await listener.start("127.0.0.1", 0)
    yield listener
    await asyncio.wait_for(listener.close(), PATIENCE_S)


@asynccontextmanager
async def connected(listener: Listener) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.address.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def ask(listener: Listener, request: bytes) -> tuple[str, dict[str, str], bytes]:
    """The status line, the headers and the body of the answer; the connection has been closed."""
    async with connected(listener) as (reader, writer):
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return first, dict(line.split(": ", 1) for line in lines), body


def get(path: str, *, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode()


async def test_a_path_answers_with_what_its_route_says(listener: Listener) -> None:
    status, headers, body = await ask(listener, get("/echo?a=b", headers="X-Word: hello \r\n"))
    assert (status, body) == ("HTTP/1.1 200 OK", b"hello")
    assert headers == {"Content-Type": "text/x-word", "Content-Length": "5", "Connection": "close"}


async def test_head_is_answered_without_the_body(listener: Listener) -> None:
    status, headers, body = await ask(listener, get("/echo", method="HEAD", headers="X-Word: hello\r\n"))
    assert (status, headers["Content-Length"], body) == ("HTTP/1.1 200 OK", "5", b"")


@pytest.mark.parametrize(
    ("status", "request_bytes"),
    [
        ("404 Not Found", get("/")),
        ("404 Not Found", get("/echo/")),
        ("405 Method Not Allowed", get("/echo", method="POST")),
        ("400 Bad Request", b"GET /echo\r\n\r\n"),
        ("400 Bad Request", b"\r\n\r\n"),
        ("400 Bad Request", b"\xff\x00 \xfe / HTTP/1.1\r\n\r\n"),
        ("400 Bad Request", b"GET / SPDY/3\r\n\r\n"),
        ("400 Bad Request", get("/echo", headers="X-Long: " + "a" * (20 << 10) + "\r\n")),
    ],
)
async def test_anything_else_is_refused(listener: Listener, status: str, request_bytes: bytes) -> None:
    assert (await ask(listener, request_bytes))[0] == f"HTTP/1.1 {status}"
    assert (await ask(listener, get("/echo")))[0] == "HTTP/1.1 200 OK"


async def test_a_bug_fails_its_request_alone(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert (await ask(listener, get("/fail")))[0] == "HTTP/1.1 500 Internal Server Error"
    assert "a bug" in caplog.text
    assert (await ask(listener, get("/echo")))[0] == "HTTP/1.1 200 OK"


async def test_slow_answers_hold_up_nobody_else(listener: Listener, routes: Routes) -> None:
    waiting = asyncio.create_task(ask(listener, get("/wait")))
    await asyncio.wait_for(routes.has_asked.wait(), PATIENCE_S)
    assert (await ask(listener, get("/echo")))[0] == "HTTP/1.1 200 OK"
    routes.may_answer.set()
    assert (await waiting)[2] == b"at last"


async def test_a_peer_that_says_nothing_is_cut_off(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_PATIENCE_S", 0.05)
    async with connected(listener) as (reader, writer):
        writer.write(b"GET /echo HT")
        assert await ends(reader)


async def ends(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection on which nothing comes."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    return True


async def test_a_peer_that_only_connects_does_no_harm(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        async with connected(listener):
            pass
    assert (await ask(listener, get("/echo")))[0] == "HTTP/1.1 200 OK"
    assert caplog.text == ""


async def test_there_is_a_bound_on_connections(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_MAX_CONNECTIONS", 2)
    async with AsyncExitStack() as silent:
        for _ in range(2):
            await silent.enter_async_context(connected(listener))
        async with connected(listener) as (reader, _):
            assert await ends(reader)


async def test_closing_ends_connections_that_are_open(routes: Routes) -> None:
    listener = Listener({"/wait": routes.wait})
    await listener.start("127.0.0.1", 0)
    async with connected(listener) as (reader, writer):
        writer.write(get("/wait"))
        await asyncio.wait_for(routes.has_asked.wait(), PATIENCE_S)
        await asyncio.wait_for(listener.close(), PATIENCE_S)
        assert await ends(reader)
    with pytest.raises(OSError, match="Connect"):
        await ask(listener, get("/wait"))
