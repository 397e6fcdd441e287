"""Leaving a stream in any way cancels its request: the connection is closed in order."""

import asyncio
import socket
from typing import Any

import pytest

import shoal
from shoal.gateways import Gateways
from tests.client.fake_gateway import CHAT, PATIENCE_S, Conversation, FakeGateway, accepted, cancelled, client_of, delta


class EndlessGateway(FakeGateway):
    """Says something and then waits for the client to leave."""

    def __init__(self) -> None:
        super().__init__(self._script)
        self.has_spoken = asyncio.Event()
        self.close_code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    async def _script(self, peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        self.has_spoken.set()
        self.close_code.set_result(await peer.closed())


async def test_leaving_the_loop_cancels() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        stream = client.stream(**CHAT)
        async for _ in stream:
            break
        assert await gateway.close_code == 1000
        assert stream.result is None


class StoppableGateway(FakeGateway):
    """Says something, and when it is told to stop, a bit more and the end, unless it dies of it."""

    def __init__(self, *, dies: bool = False) -> None:
        super().__init__(self._script)
        self.told: dict[str, Any] = {}
        self._dies = dies

    async def _script(self, peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        self.told = await peer.receive()
        if self._dies:
            peer.cut()
        else:
            await peer.send(delta(3, "lo"), cancelled())
            await peer.closed()


async def stop_at_once(stream: shoal.Stream, texts: list[str]) -> None:
    async for one in stream:
        texts.append(one.text)
        await stream.stop()


async def test_stopping_gives_what_was_produced_and_tells_what_was_consumed() -> None:
    gateway = StoppableGateway()
    async with client_of(gateway) as client:
        texts: list[str] = []
        with pytest.raises(shoal.RequestCancelled) as caught:
            await stop_at_once(client.stream(**CHAT), texts)
        assert (texts, caught.value.usage) == (["Hel", "lo"], shoal.Usage(3, 4, 2))
        assert gateway.told == {"type": "request.cancel", "id": "stream"}


async def test_what_was_stopped_is_not_resumed_when_its_connection_is_lost() -> None:
    gateway = StoppableGateway(dies=True)
    async with client_of(gateway) as client:
        stream = client.stream(**CHAT)
        await stop_at_once(stream, [])
        assert stream.result is None
        assert gateway.num_connections == 1


async def test_stopping_before_there_is_a_connection_cancels() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        stream = client.stream(**CHAT)
        await stream.stop()
        assert [delta async for delta in stream] == []
        assert gateway.num_connections == 0


async def test_stopping_between_two_tries_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = asyncio.Event()

    def wait_s(_gateways: Gateways, num_failures: int) -> float:
        if num_failures == 0:
            return 0.0
        waits.set()
        return 3600.0

    monkeypatch.setattr(Gateways, "wait_s", wait_s)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with shoal.Client(f"127.0.0.1:{unused.getsockname()[1]}") as client:
            stream = client.stream(**CHAT)
            reading = asyncio.create_task(anext(aiter(stream), None))
            await asyncio.wait_for(waits.wait(), PATIENCE_S)
            await asyncio.sleep(0)
            await stream.stop()
            assert await asyncio.wait_for(reading, PATIENCE_S) is None


async def test_leaving_the_block_cancels() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        async with client.stream(**CHAT) as stream:
            deltas = aiter(stream)
            await anext(deltas)
        assert await gateway.close_code == 1000


async def fail_in_the_middle(stream: shoal.Stream) -> None:
    async for _ in stream:
        raise ZeroDivisionError


async def test_exception_in_the_loop_cancels() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        with pytest.raises(ZeroDivisionError):
            await fail_in_the_middle(client.stream(**CHAT))
        assert await gateway.close_code == 1000


async def test_cancelled_task_cancels_its_request() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        asking = asyncio.create_task(client.generate(**CHAT))
        await gateway.has_spoken.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await gateway.close_code == 1000


async def test_cancel_from_outside_ends_the_iteration_without_a_result() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        stream = client.stream(**CHAT)
        texts = []
        async for one in stream:
            texts.append(one.text)
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(stream.cancel()))
        assert (texts, stream.result) == (["Hel"], None)
        assert await gateway.close_code == 1000


async def test_closing_the_client_cancels_what_is_open_and_nothing_can_be_asked_any_more() -> None:
    gateway = EndlessGateway()
    async with client_of(gateway) as client:
        stream = client.stream(**CHAT)
        await anext(aiter(stream))
        await client.close()
        assert await gateway.close_code == 1000
        with pytest.raises(RuntimeError, match="closed"):
            await client.generate(**CHAT)
