"""Streams that are refused or fail: each error has its type, and the text before it stands."""

import asyncio

import pytest

import shoal
from tests.client.fake_gateway import CHAT, Conversation, FakeGateway, accepted, client_of, completed, delta, failed
from tests.client.reading import hello, read


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, shoal.AuthenticationFailed),
        (403, shoal.NotAllowed),
        (400, shoal.InvalidRequest),
        (404, shoal.NotAShoalGateway),
    ],
)
async def test_connection_that_is_refused_for_good_raises_at_once(status: int, kind: type[Exception]) -> None:
    gateway = FakeGateway(status=status)
    async with client_of(gateway) as client:
        with pytest.raises(kind):
            await client.generate(**CHAT)
    assert gateway.num_connections == 1


@pytest.mark.parametrize(
    ("type_", "code", "kind"),
    [
        ("invalid_request_error", "context_length_exceeded", shoal.InvalidRequest),
        ("invalid_request_error", "request_too_large", shoal.TooLarge),
        ("invalid_request_error", "model_not_found", shoal.NotFound),
        ("permission_error", "not_allowed", shoal.NotAllowed),
        ("rate_limit_error", "queue_full", shoal.Overloaded),
        ("service_unavailable_error", "unavailable", shoal.Unavailable),
        ("timeout_error", "deadline_exceeded", shoal.DeadlineExceeded),
        ("conflict_error", "resumed_elsewhere", shoal.ResumedElsewhere),
        ("server_error", "stalled", shoal.RequestError),
    ],
)
async def test_failure_of_a_request_has_its_type(type_: str, code: str, kind: type[shoal.RequestError]) -> None:
    async def script(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"), failed(type_, code, is_known=True, retry_after_s=1.5))

    async with client_of(FakeGateway(script)) as client:
        texts: list[str] = []
        with pytest.raises(shoal.RequestError) as caught:
            await read(client.stream(**CHAT), texts)
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.message) == (code, f"It is {code}.")
        assert (caught.value.request_id, caught.value.retry_after_s) == ("req-1", 1.5)
        assert texts == ["Hel"]


async def test_refusal_for_the_moment_is_tried_again_when_the_mesh_says() -> None:
    times = []

    async def refuses(peer: Conversation) -> None:
        await peer.receive()
        times.append(asyncio.get_running_loop().time())
        await peer.send(failed("rate_limit_error", "queue_full", retry_after_s=0.3))

    async def takes(peer: Conversation) -> None:
        times.append(asyncio.get_running_loop().time())
        await hello(peer)

    async with client_of(FakeGateway(refuses, takes)) as client:
        assert (await client.generate(**CHAT)).text == "Hello"
    assert times[1] - times[0] >= 0.3


async def test_refusals_are_raised_in_the_end() -> None:
    async def refuses(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(failed("rate_limit_error", "queue_full", retry_after_s=0.01))

    gateway = FakeGateway(refuses)
    async with client_of(gateway, num_retries=2) as client:
        with pytest.raises(shoal.Overloaded):
            await client.generate(**CHAT)
    assert gateway.num_connections == 3


async def test_request_that_nobody_finds_again_is_lost_and_its_text_stands() -> None:
    async def first(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), delta(0, "Hel"))
        await asyncio.sleep(0.05)
        peer.cut()

    async def knows_nothing(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(failed("invalid_request_error", "not_found", is_known=True))

    gateway = FakeGateway(first, knows_nothing)
    async with client_of(gateway) as client:
        texts: list[str] = []
        with pytest.raises(shoal.RequestLost):
            await read(client.stream(**CHAT), texts)
        assert texts == ["Hel"]
    assert gateway.num_connections == 4, "it was looked for three times"


async def test_lost_request_of_which_nothing_was_seen_begins_anew() -> None:
    async def first(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted())
        await asyncio.sleep(0.05)
        peer.cut()

    async def knows_nothing(peer: Conversation) -> None:
        assert (await peer.receive())["type"] == "request.resume"
        await peer.send(failed("invalid_request_error", "not_found", is_known=True))

    async with client_of(FakeGateway(first, knows_nothing, hello)) as client:
        assert (await client.generate(**CHAT)).text == "Hello"


async def test_failure_that_a_resumed_request_had_is_raised_after_its_text() -> None:
    async def first(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted())
        await asyncio.sleep(0.05)
        peer.cut()

    async def second(peer: Conversation) -> None:
        await peer.receive()
        unavailable = failed("service_unavailable_error", "unavailable", is_known=True)
        await peer.send(accepted(), delta(0, "Hel"), unavailable)

    async with client_of(FakeGateway(first, second)) as client:
        with pytest.raises(shoal.Unavailable):
            await client.generate(**CHAT)


async def test_request_that_no_gateway_reads_to_its_end_is_too_large() -> None:
    async def refuse_to_read(peer: Conversation) -> None:
        with pytest.raises(TypeError):  # what comes instead of a message
            await peer.receive()

    gateway = FakeGateway(refuse_to_read)
    async with client_of(gateway) as client:
        with pytest.raises(shoal.TooLarge):
            await client.generate(model="m", prompt="a" * (32 << 20))
        assert gateway.num_connections == 3


async def test_cancellation_by_somebody_else_is_an_error() -> None:
    async def script(peer: Conversation) -> None:
        await peer.receive()
        await peer.send(accepted(), {"type": "request.cancelled", "id": "stream", "request_id": "req-1", "usage": None})

    async with client_of(FakeGateway(script)) as client:
        with pytest.raises(shoal.RequestCancelled) as caught:
            await client.generate(**CHAT)
    assert caught.value.usage is None


@pytest.mark.parametrize("kind", ["request.cancelled", "request.failed"])
async def test_what_a_request_consumed_that_did_not_complete_is_told(kind: str) -> None:
    async def script(peer: Conversation) -> None:
        usage = completed()["usage"]
        end = failed("timeout_error", "deadline_exceeded", is_known=True) | {"type": kind, "usage": usage}
        await peer.send(accepted(), delta(0, "Hel"), end)

    async with client_of(FakeGateway(script)) as client:
        with pytest.raises(shoal.RequestError) as caught:
            await client.generate(**CHAT)
    assert caught.value.usage == shoal.Usage(3, 4, 2)
