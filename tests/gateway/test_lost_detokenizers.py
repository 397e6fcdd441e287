"""A detokenizer dies: another one says what it had not said, or its requests fail."""

from shared.ids import InstanceId, Service
from tests.gateway.fake_mesh import FakeRequest
from tests.gateway.harness import CHAT, Harness, assert_ended_once, events_of, running_gateway, text_of


async def test_a_lost_detokenizer_fails_its_requests_unless_another_goes_on() -> None:
    async with running_gateway(failover_timeout_s=5.0) as harness:
        response, request = await harness.open_stream(CHAT)
        await request.say("Hel")
        await harness.settle()
        harness.fake.silent.add(Service.DETOKENIZER)
        await harness.advance(6.0)
        assert len(harness.mesh.requests) == 1, "another one may come"
        harness.fake.silent.clear()
        harness.fake.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
        await harness.advance(8.0)
        again = FakeRequest(harness.fake, request.message)
        await again.say("Hello")
        await harness.settle()
        harness.fake.silent.add(Service.DETOKENIZER)
        await harness.advance(7.5)
        events = await events_of(response)
        assert_ended_once(events, error="unavailable")
        assert text_of(events) == "Hello"


async def test_what_a_lost_detokenizer_may_have_kept_is_asked_for_soon(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.settle()
    await harness.fake.announce(Service.DETOKENIZER, InstanceId("detokenizer-bbbbbbbb"))
    await harness.fake.announce(Service.DETOKENIZER, harness.fake.detokenizer_id, is_leaving=True)
    harness.fake.detokenizer_id = InstanceId("detokenizer-bbbbbbbb")
    await harness.advance(1.0)
    assert (await harness.fake.next_replay()).num_tokens == (1,)
    await request.finish()
    assert_ended_once(await events_of(response), reason="stop")


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
    await harness.advance(22.0)
    status, answer = await asking
    assert (status, answer["error"]["code"]) == (503, "unavailable")
