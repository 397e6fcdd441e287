"""Clients over HTTP that leave, or read slowly: what is stopped, what is bounded, and who else notices (nobody)."""

import asyncio
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from shared.errors import InvalidRequest
from shared.ids import Service
from shared.messages import ErrorInfo, Outcome
from tests.gateway.fake_mesh import FakeRequest
from tests.gateway.harness import CHAT, CHAT_PATH, Harness, assert_ended_once, events_of, text_of

# The client leaves.


async def _nothing(_: FakeRequest) -> None:
    return


async def _accepted(request: FakeRequest) -> None:
    await request.accept()


async def _speaking(request: FakeRequest) -> None:
    await request.accept()
    await request.say("a")


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("moment", [_nothing, _accepted, _speaking])
async def test_disconnect_at_any_moment_cancels_the_request(
    harness: Harness, moment: Callable[[FakeRequest], Awaitable[None]], is_stream: bool
) -> None:
    asking = asyncio.create_task(harness.http.post(harness.url + CHAT_PATH, json=CHAT | {"stream": is_stream}))
    request = await harness.fake.next_request()
    await moment(request)
    if is_stream and moment is not _nothing:
        (await asking).close()
    else:
        asking.cancel()
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert harness.mesh.requests.num_ended == {Outcome.CANCELLED: 1}
    assert harness.mesh.num_disconnects == 1


async def test_cancellation_is_repeated_until_confirmed_and_then_believed(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    response.close()
    assert await harness.fake.next_cancellation() == request.request_id
    await harness.advance(1.0)
    assert await harness.fake.next_cancellation() == request.request_id
    assert len(harness.mesh.requests) == 1
    await harness.advance(4.5)
    assert len(harness.mesh.requests) == 0
    assert harness.mesh.requests.num_ended == {Outcome.CANCELLED: 1}
    num_sent = harness.fake.cancellations.qsize()
    await harness.advance(5.0)
    assert harness.fake.cancellations.qsize() == num_sent


async def test_refusal_after_a_cancellation_confirms_it(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    asking.cancel()
    await harness.fake.next_cancellation()
    await request.refuse(ErrorInfo.of(InvalidRequest("Late.")))
    await harness.nothing_is_left()
    assert harness.mesh.requests.num_ended == {Outcome.CANCELLED: 1}


async def test_finish_that_races_a_cancellation_counts_once(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    response.close()
    await harness.fake.next_cancellation()
    await request.finish()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert harness.mesh.requests.num_ended == {Outcome.COMPLETED: 1}


async def test_scheduler_lost_during_a_cancellation_leaves_it_cancelled(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    response.close()
    await harness.fake.next_cancellation()
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    await harness.settle()
    assert harness.mesh.requests.num_ended == {Outcome.CANCELLED: 1}
    await harness.advance(5.5)
    assert len(harness.mesh.requests) == 0
    await request.close(Outcome.CANCELLED)


async def test_storm_of_disconnects_leaves_nothing(harness: Harness) -> None:
    asking = [asyncio.create_task(harness.chat(stream=number % 2 == 0)) for number in range(60)]
    requests = [await harness.fake.next_request() for _ in asking]
    for number, request in enumerate(requests):
        if number % 3:
            await request.accept()
        if number % 3 == 2:
            await request.say("a")
    for task in asking:
        task.cancel()
    cancelled = {await harness.fake.next_cancellation() for _ in requests}
    assert cancelled == {request.request_id for request in requests}
    for request in requests:
        await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    await harness.until(lambda: harness.gateway.server.num_connections == 0)
    assert len(harness.mesh.on_tick) == 1, "only the server's own"


# The client reads slowly.


async def test_slow_reader_gets_longer_pieces_and_slows_nobody(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    other_response, other = await harness.open_stream(CHAT)
    piece = "x" * 10_000
    for _ in range(2000):
        await request.say(piece)
        await harness.settle()
    await other.complete("quick")
    assert text_of(await events_of(other_response)) == "quick"
    await request.finish()
    events = await events_of(response)
    assert_ended_once(events, reason="stop")
    assert len(text_of(events)) == 20_000_000
    assert len(events) < 1900, "what it missed came in longer pieces"


async def test_reader_that_takes_nothing_is_cut_off_and_its_request_cancelled(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    for _ in range(2000):
        await request.say("x" * 10_000)
        await harness.settle()
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(2.0)
    assert await harness.fake.next_cancellation() == request.request_id
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    with pytest.raises(aiohttp.ClientError):
        await response.read()


async def take_some(response: aiohttp.ClientResponse, harness: Harness) -> None:
    """Read until the gateway's socket has taken something, for only that it sees: what the client reads at first comes
    from the system's buffers, which may have megabytes before they ask for more, how many is a matter of speed."""
    (before,) = harness.unsent()
    while before > 0 and harness.unsent() == [before]:
        await response.content.readexactly(100_000)


async def test_reader_that_takes_something_is_not_cut_off(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    for _ in range(3000):
        await request.say("x" * 10_000)
        await harness.settle()
    assert harness.unsent() > [0], "it does not get all at once"
    for _ in range(4):
        await harness.advance(20.0)
        await take_some(response, harness)
    assert harness.fake.cancellations.empty()
    await request.finish()
    assert_ended_once(await events_of(response), reason="stop")
