"""The gateway itself leaves: what the clients of open requests see."""

import asyncio

from tests.gateway.fake_mesh import PATIENCE_S
from tests.gateway.harness import CHAT, CHAT_PATH, Harness, assert_ended_once, events_of, text_of


async def test_draining_gateway_refuses_new_requests_and_finishes_the_others(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    harness.gateway.drain(10.0)
    async with harness.post(CHAT_PATH, CHAT) as refused:
        assert refused.status == 503
        assert "Retry-After" in refused.headers
    async with harness.http.get(harness.url + "/readyz") as report:
        assert (report.status, (await report.json())["is_draining"]) == (503, True)
    async with harness.http.get(harness.url + "/healthz") as report:
        assert report.status == 200
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")
    await asyncio.wait_for(harness.running, PATIENCE_S)


async def test_drain_deadline_ends_what_is_left_with_one_error(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    asking, other = await harness.start_chat()
    await other.accept()
    await request.say("a")
    harness.gateway.drain(3.0)
    await harness.advance(3.5)
    await asyncio.wait_for(harness.running, PATIENCE_S)
    stopping = asyncio.create_task(harness.gateway.on_stop())
    events = await events_of(response)
    assert_ended_once(events, error="unavailable")
    assert text_of(events) == "a"
    assert (await asking)[0] == 503
    await stopping
    assert {await harness.fake.next_cancellation(), await harness.fake.next_cancellation()} == {
        request.request_id,
        other.request_id,
    }


async def test_idle_gateway_leaves_at_once(harness: Harness) -> None:
    harness.gateway.drain(1000.0)
    await asyncio.wait_for(harness.running, PATIENCE_S)
