"""A new request that no scheduler takes at the moment waits, goes to another one, or is refused."""

import asyncio

import pytest

from shared.errors import Unavailable
from shared.ids import Service
from shared.messages import ErrorInfo
from tests.gateway.fake_mesh import PATIENCE_S
from tests.gateway.harness import CHAT, CHAT_PATH, OTHER_SCHEDULER, Harness


async def test_a_new_request_that_a_leaving_scheduler_refuses_goes_to_another_one(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.fake.add_scheduler(OTHER_SCHEDULER)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await request.refuse(ErrorInfo.of(Unavailable("shutting down")))
    again = await harness.fake.next_request()
    assert again.message.scheduler_id == OTHER_SCHEDULER
    await again.complete("a")
    assert (await asking)[0] == 200


async def change_hands(harness: Harness) -> None:
    """The scheduler with the executors drains, and another one is about to take them."""
    await harness.advance(0.5)
    await harness.fake.add_scheduler(OTHER_SCHEDULER, has_executors=False)
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_new_request_waits_while_executors_change_hands(harness: Harness, is_stream: bool) -> None:
    await change_hands(harness)
    async with harness.http.get(harness.url + "/readyz") as report:
        assert report.status == 200, "a request would be served"
    asking = asyncio.create_task(harness.http.post(harness.url + CHAT_PATH, json=CHAT | {"stream": is_stream}))
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    await harness.advance(3.0)
    assert not asking.done()
    assert harness.fake.submissions.empty()
    await harness.fake.give_executors(OTHER_SCHEDULER)
    request = await harness.fake.next_request()
    assert (request.message.scheduler_id, request.message.attempt) == (OTHER_SCHEDULER, 1)
    await request.complete("a")
    async with await asking as response:
        assert response.status == 200


async def test_a_new_request_waits_only_as_long_as_there_is_hope(harness: Harness) -> None:
    await change_hands(harness)
    asking = asyncio.create_task(harness.chat())
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    await harness.advance(4.0)
    assert not asking.done()
    await harness.advance(1.5)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    await harness.nothing_is_left()
    async with harness.http.get(harness.url + "/readyz") as report:
        assert report.status == 503


async def test_a_new_request_that_waits_ends_when_its_client_leaves(harness: Harness) -> None:
    await change_hands(harness)
    asking = asyncio.create_task(harness.chat())
    await harness.until(lambda: len(harness.mesh.requests) == 1)
    asking.cancel()
    await harness.nothing_is_left()
    await harness.fake.give_executors(OTHER_SCHEDULER)
    await harness.advance(1.0)
    assert harness.fake.submissions.empty()


async def test_a_new_request_that_is_refused_just_before_executors_change_hands_waits_too(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await harness.advance(0.5)
    await request.refuse(ErrorInfo.of(Unavailable("shutting down")))
    await harness.settle()
    assert not asking.done(), "why it was refused is not known here yet"
    await change_hands(harness)
    await harness.fake.give_executors(OTHER_SCHEDULER)
    await harness.advance(0.5)
    again = await harness.fake.next_request()
    while again.message.scheduler_id != OTHER_SCHEDULER:
        await again.refuse(ErrorInfo.of(Unavailable("shutting down")))
        await harness.advance(0.5)
        again = await harness.fake.next_request()
    await again.complete("a")
    assert (await asking)[0] == 200


async def test_a_new_request_that_the_only_scheduler_refuses_as_it_leaves_is_told_so(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    harness.fake.draining.add(Service.SCHEDULER)
    await harness.fake.beat()
    await harness.settle()
    await request.refuse(ErrorInfo.of(Unavailable("shutting down", retry_after_s=2.0)))
    status, answer = await asyncio.wait_for(asking, PATIENCE_S)
    assert (status, answer["error"]["message"]) == (503, "shutting down")
