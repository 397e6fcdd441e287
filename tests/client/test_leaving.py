"""Leaving a stream in any way cancels its request: the connection is closed in order."""

import asyncio

import pytest

import shoal
from tests.client.fake_gateway import CHAT, Conversation, FakeGateway, accepted, client_of, delta


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
