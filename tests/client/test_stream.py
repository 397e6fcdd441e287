"""Streams over real sockets against a scripted gateway: begun, lost, resumed."""

import asyncio
import socket

import aiohttp
import pytest

import shoal
from shoal.connection import _GOODBYE_S
from tests.client.fake_gateway import CHAT, PATIENCE_S, Conversation, FakeGateway, accepted, client_of, completed, delta
from tests.client.reading import hello


async def test_stream_gives_every_delta_and_then_the_result() -> None:
    messages = []

    async def script(peer: Conversation) -> None:
        messages.append(await peer.receive())
        await peer.send(accepted(), {"type": "something new"}, delta(0, "Hel"), delta(3, "lo"), completed())
        assert await peer.closed() == 1000

    async with client_of(FakeGateway(script), api_key="secret") as client:
        stream = client.stream(**CHAT, max_tokens=5, token_ids=True)
        deltas = [delta async for delta in stream]
        assert deltas == [shoal.Delta(0, 0, "Hel"), shoal.Delta(0, 3, "lo")]
        assert stream.request_id == "req-1"
        assert stream.result is not None
        assert (stream.result.text, stream.result.finish_reason) == ("Hello", "stop")
    (message,) = messages
    assert message == {
        "type": "request.create",
        "id": "stream",
        "body": CHAT | {"max_tokens": 5},
        "token_ids": True,
    }


async def test_generate_gives_the_whole() -> None:
    async with client_of(FakeGateway(hello), model="m") as client:
        result = await client.generate(prompt="Once")
        assert (result.text, result.usage.completion_tokens) == ("Hello", 4)


async def test_key_and_protocol_are_offered() -> None:
    headers: dict[str, str] = {}

    async def script(peer: Conversation) -> None:
        headers.update(peer.headers)
        await hello(peer)

    async with client_of(FakeGateway(script), api_key="secret") as client:
        await client.generate(**CHAT)
    assert headers["Authorization"] == "Bearer secret"
    assert headers["Sec-WebSocket-Protocol"] == "shoal.v1.json"


def test_impossible_calls_are_refused_at_once() -> None:
    client = shoal.Client("127.0.0.1:1")
    for arguments in ({}, CHAT | {"prompt": "x"}):
        with pytest.raises(ValueError, match="either messages or prompt"):
            client.stream(**arguments)
    with pytest.raises(ValueError, match="model"):
        client.stream(prompt="x")


async def test_stream_is_iterated_over_once() -> None:
    async with client_of(FakeGateway(hello)) as client:
        stream = client.stream(**CHAT)
        _ = [delta async for delta in stream]
        with pytest.raises(RuntimeError, match="once"):
            _ = [delta async for delta in stream]


@pytest.mark.parametrize("how", ["reset", 1001, 1006, 1008, 1012])
async def test_stream_goes_on_where_it_was(how: str | int) -> None:
    resumed = []

    async def first(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "He"), delta(0, "s", index=1))
        await asyncio.sleep(0.05)  # a reset discards what was not read yet, which is fine but not what is tested
        if how == "reset":
            peer.cut()
        else:
            assert isinstance(how, int)
            await peer.close(how) if how != 1006 else peer.cut()

    async def second(peer: Conversation) -> None:
        resumed.append(await peer.receive())
        await peer.send(accepted(), delta(2, "llo"), delta(1, "o", index=1), completed(num_choices=2))

    async with client_of(FakeGateway(first, second)) as client:
        result = await client.generate(**CHAT, n=2)
        assert [choice.text for choice in result.choices] == ["Hello", "so"]
    assert resumed == [
        {
            "type": "request.resume",
            "id": "stream",
            "request_id": "req-1",
            "offset": [2, 1],
            "token_offset": [0, 0],
        }
    ]


async def test_text_that_is_said_again_is_given_once() -> None:
    async def first(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel", token_offset=0, token_ids=[1, 2]))
        await asyncio.sleep(0.05)
        peer.cut()

    async def second(peer: Conversation) -> None:
        message = await peer.receive()
        assert (message["offset"], message["token_offset"]) == ([3], [2])
        await peer.send(accepted(), delta(0, "Hello", token_offset=0, token_ids=[1, 2, 3]), completed())

    async with client_of(FakeGateway(first, second)) as client:
        stream = client.stream(**CHAT, token_ids=True)
        assert [(delta.text, delta.token_ids) async for delta in stream] == [("Hel", (1, 2)), ("lo", (3,))]


async def test_another_gateway_goes_on_when_one_is_gone() -> None:
    async def dies(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        await asyncio.sleep(0.05)
        peer.cut()

    async def goes_on(peer: Conversation) -> None:
        assert (await peer.receive())["request_id"] == "req-1"
        await peer.send(accepted(), delta(3, "lo"), completed())

    one, other = FakeGateway(dies), FakeGateway(goes_on)
    async with client_of(one, other) as client:
        assert (await client.generate(**CHAT)).text == "Hello"
    assert (one.num_connections, other.num_connections) == (1, 1)


async def test_request_that_was_not_accepted_is_created_again() -> None:
    kinds = []

    async def first(peer: Conversation) -> None:
        kinds.append((await peer.receive())["type"])
        peer.cut()

    async def second(peer: Conversation) -> None:
        kinds.append((await peer.receive())["type"])
        await peer.send(accepted(), delta(0, "Hello"), completed())

    async with client_of(FakeGateway(first, second)) as client:
        assert (await client.generate(**CHAT)).text == "Hello"
    assert kinds == ["request.create", "request.create"]


async def test_missing_part_of_the_text_is_never_passed_over() -> None:
    async def script(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"), delta(4, "o"), completed())

    async with client_of(FakeGateway(script)) as client:
        with pytest.raises(shoal.NotAShoalGateway, match="no sense"):
            await client.generate(**CHAT)


async def test_dead_address_is_passed_over() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{unused.getsockname()[1]}"
        async with FakeGateway(hello) as gateway, shoal.Client([dead, gateway.address]) as client:
            assert (await client.generate(**CHAT)).text == "Hello"
            assert (await client.generate(**CHAT)).text == "Hello"
            assert gateway.num_connections == 2


async def test_silence_of_a_gateway_is_noticed() -> None:
    async def frozen(peer: Conversation) -> None:
        await asyncio.sleep(PATIENCE_S)  # reads nothing, so it answers no ping

    async with client_of(FakeGateway(frozen, hello), heartbeat_s=0.2) as client:
        assert (await client.generate(**CHAT)).text == "Hello"


async def test_gateway_that_freezes_in_the_middle_is_left_within_three_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed_with: list[int | None] = []
    is_left = asyncio.Event()
    waited_s: list[float] = []
    """For what did not come; how long that took on this machine says less."""
    receive = aiohttp.ClientWebSocketResponse.receive

    async def receive_and_note(socket: aiohttp.ClientWebSocketResponse, **patience: float) -> aiohttp.WSMessage:
        try:
            return await receive(socket, **patience)
        except TimeoutError:
            if not is_left.is_set():
                waited_s.append(patience["timeout"])
            raise

    monkeypatch.setattr(aiohttp.ClientWebSocketResponse, "receive", receive_and_note)

    async def freezes(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        await is_left.wait()
        assert await peer.receive() == {"type": "ping"}
        closed_with.append(await peer.closed())

    async def goes_on(peer: Conversation) -> None:
        assert (await peer.receive())["type"] == "request.resume"
        is_left.set()
        await peer.send(accepted(), delta(3, "lo"), completed())
        await peer.closed()

    one = FakeGateway(freezes)
    async with client_of(one, FakeGateway(goes_on)) as client:
        stream = client.stream(**CHAT)
        deltas = aiter(stream)
        await anext(deltas)
        waited_s.clear()
        await anext(deltas)
        assert sum(waited_s) + _GOODBYE_S < 3.0
        assert [delta async for delta in deltas] == []
        assert stream.result is not None
        assert stream.result.text == "Hello"
        while not closed_with:  # noqa: ASYNC110  # it thaws
            await asyncio.sleep(0.02)
    assert closed_with != [1000], "a frozen gateway that thaws must not think that nobody wants the rest"


async def test_gateway_that_has_nothing_to_say_but_answers_is_kept() -> None:
    async def thinks(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted())
        for _ in range(3):
            assert await peer.receive() == {"type": "ping"}
            await peer.send({"type": "pong"})
        await peer.send(delta(0, "Hello"), completed())
        await peer.closed()

    gateway = FakeGateway(thinks)
    async with client_of(gateway, heartbeat_s=0.1) as client:
        assert (await client.generate(**CHAT)).text == "Hello"
    assert gateway.num_connections == 1


async def test_large_request_may_take_its_time_to_arrive() -> None:
    async def slow(peer: Conversation) -> None:
        await asyncio.sleep(2.5)  # a ping would have to stand in line behind the request
        await hello(peer)

    gateway = FakeGateway(slow)
    async with client_of(gateway, heartbeat_s=0.1) as client:
        assert (await client.generate(prompt="x" * 100_000, model="m")).text == "Hello"
    assert gateway.num_connections == 1


async def test_nobody_there_for_too_long_is_an_error_that_says_why() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with shoal.Client(f"127.0.0.1:{unused.getsockname()[1]}", patience_s=0.5) as client:
            with pytest.raises(shoal.Disconnected, match=r"for 0.5 s: http://127\.0\.0\.1"):
                await client.generate(**CHAT)


async def test_gateway_that_drains_finishes_what_it_has_and_gets_nothing_new() -> None:
    async def drains(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"), {"type": "going_away", "deadline_ms": 1000})
        await peer.send(delta(3, "lo"), completed())

    one, other = FakeGateway(drains), FakeGateway(hello)
    async with client_of(one, other) as client:
        assert (await client.generate(**CHAT)).text == "Hello"
        assert (await client.generate(**CHAT)).text == "Hello"
    assert (one.num_connections, other.num_connections) == (1, 1)


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_gateway_that_takes_no_connections_is_passed_over(status: int) -> None:
    async with client_of(FakeGateway(status=status), FakeGateway(hello)) as client:
        assert (await client.generate(**CHAT)).text == "Hello"


async def test_resume_goes_on_after_what_the_caller_has() -> None:
    async def script(peer: Conversation) -> None:
        message = await peer.receive()
        assert (message["request_id"], message["offset"], message["token_offset"]) == ("req-1", [3], [1])
        await peer.send(accepted(), delta(3, "lo"), completed())

    async with client_of(FakeGateway(script)) as client:
        stream = client.resume("req-1", offset=3, token_offset=1)
        assert [delta.text async for delta in stream] == ["lo"]
        assert stream.result is not None
        assert stream.result.text == "lo"
