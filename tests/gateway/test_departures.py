"""A service dies, or the gateway itself leaves: what the clients of open requests see."""

import asyncio
from typing import Any

import pytest

from shared.errors import RequestError
from shared.ids import InstanceId, Service
from tests.gateway.fake_mesh import MODEL, FakeRequest
from tests.gateway.harness import CHAT, Harness, assert_ended_once, events_of, running_gateway, text_of

PATH = "/v1/chat/completions"


# Who holds the request dies.


@pytest.mark.parametrize("is_accepted", [True, False])
async def test_silent_scheduler_fails_its_requests(is_accepted: bool) -> None:
    async with running_gateway(max_submissions=100) as harness:
        asking, request = await harness.start_chat()
        if is_accepted:
            await request.accept()
        harness.fake.silent.add(Service.SCHEDULER)
        await harness.advance(2.5)
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert "scheduler" in answer["error"]["message"]
        assert await harness.fake.next_cancellation() == request.request_id, "in case it only slept"


async def test_leaving_scheduler_fails_its_requests_at_once(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    events = await events_of(response)
    assert_ended_once(events, error="unavailable")
    assert text_of(events) == "a"


async def test_other_schedulers_death_changes_nothing(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    other = InstanceId("scheduler-bbbbbbbb")
    await harness.fake.announce(Service.SCHEDULER, other)
    await harness.advance(3.0)
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")


async def test_lost_detokenizer_fails_its_requests_unless_another_goes_on(harness: Harness) -> None:
    response, lost = await harness.open_stream(CHAT)
    other_response, continued = await harness.open_stream(CHAT)
    await lost.say("a")
    await continued.say("Hel")
    await harness.settle()
    harness.fake.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
    await harness.advance(2.5)
    replay = FakeRequest(harness.fake, continued.message)
    await replay.say("Hello")
    await harness.advance(4.0)
    assert len(harness.mesh.requests) == 2, "its scheduler may still give it to the other one"
    await harness.advance(1.5)
    events = await events_of(response)
    assert_ended_once(events, error="unavailable")
    assert text_of(events) == "a"
    await replay.finish()
    events = await events_of(other_response)
    assert_ended_once(events, reason="stop")
    assert text_of(events) == "Hello"


async def test_request_without_text_survives_if_a_detokenizer_comes_back(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    harness.fake.silent.add(Service.DETOKENIZER)
    await harness.advance(5.0)
    harness.fake.detokenizer_id = request.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
    harness.fake.silent.clear()
    await harness.advance(10.0)
    await request.complete("a")
    assert (await asking)[0] == 200


async def test_request_without_text_fails_if_no_detokenizer_comes_back(harness: Harness) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    harness.fake.silent.add(Service.DETOKENIZER)
    await harness.advance(8.0)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")


# The gateway leaves.


async def test_draining_gateway_refuses_new_requests_and_finishes_the_others(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    harness.gateway.drain(10.0)
    async with harness.post(PATH, CHAT) as refused:
        assert refused.status == 503
        assert "Retry-After" in refused.headers
    async with harness.http.get(harness.url + "/readyz") as report:
        assert (report.status, (await report.json())["is_draining"]) == (503, True)
    async with harness.http.get(harness.url + "/healthz") as report:
        assert report.status == 200
    await request.complete("a")
    assert_ended_once(await events_of(response), reason="stop")
    await asyncio.wait_for(harness.running, 5)


async def test_drain_deadline_ends_what_is_left_with_one_error(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    asking, other = await harness.start_chat()
    await other.accept()
    await request.say("a")
    harness.gateway.drain(3.0)
    await harness.advance(3.5)
    await asyncio.wait_for(harness.running, 5)
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
    await asyncio.wait_for(harness.running, 5)


async def test_bug_in_a_shape_ends_its_stream_with_an_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    response, request = await harness.open_stream(CHAT)
    monkeypatch.setattr("services.gateway.chat.ChatShape.chunks", broken)
    await request.say("a")
    assert_ended_once(await events_of(response), error=RequestError.code)
    assert await harness.fake.next_cancellation() == request.request_id
    assert MODEL in harness.mesh.admission.models()
