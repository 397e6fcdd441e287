"""The gateway's metrics of requests: each is counted once, however it began, went on and ended."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from services.gateway import metrics as under_test
from services.gateway.metrics import GatewayMetrics
from shared.errors import InvalidRequest, Overloaded
from shared.ids import InstanceId
from shared.messages import ErrorInfo, FinishReason, Outcome
from tests.gateway.harness import CHAT, COMPLETION, Harness, running_gateway
from tests.gateway.metering import DURATION, LABELS, TPOT, TTFT, endings, measured, say_after, scrape
from tests.gateway.peers import connected
from tests.gateway.resuming import begun, left_behind, rest, resume
from tests.gateway.test_accounts import make_account


@pytest.fixture
async def harness(harness: Harness) -> AsyncIterator[Harness]:
    """One whose metrics are shown."""
    async with measured(harness):
        yield harness


async def test_times_are_those_between_admission_first_token_and_end(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await say_after(harness, 0.3, request, "", num_tokens=0)
    await say_after(harness, 0.2, request, "a")
    await say_after(harness, 1, request, "b", num_tokens=4)
    harness.clock.advance(1)
    await request.finish()
    await response.text()
    page = await scrape(harness)
    assert page.value(f"{TTFT}_sum", **LABELS) == pytest.approx(0.5)
    assert page.value(f"{TPOT}_sum", **LABELS) == pytest.approx(2 / 4)
    assert page.value(f"{DURATION}_sum", **LABELS, error_type="") == pytest.approx(2.5)
    for name in (TTFT, TPOT, DURATION):
        assert page.total(f"{name}_count") == 1


async def test_time_for_each_token_is_that_of_the_longest_choice_of_a_completed_request(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT | {"n": 2})
    await say_after(harness, 0, request, "a", index=1)
    await say_after(harness, 6, request, "b", index=0, num_tokens=4)
    await request.finish()
    await response.text()
    assert (await scrape(harness)).value(f"{TPOT}_sum", **LABELS) == pytest.approx(2)
    for outcome, num_tokens in ((Outcome.FAILED, 5), (Outcome.COMPLETED, 1)):
        response, request = await harness.open_stream(CHAT)
        await request.say("a", num_tokens=num_tokens)
        await (request.finish() if outcome is Outcome.COMPLETED else request.close(outcome))
        await response.text()
    page = await scrape(harness)
    assert page.total(f"{TPOT}_count") == 1, "one token takes no time, and what failed has no speed"
    assert page.total(f"{TTFT}_count") == 3


async def test_first_token_is_counted_once_however_often_it_is_said(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.replay()
    await request.say("b")
    await request.finish()
    await request.replay()
    await response.text()
    await request.replay()
    page = await scrape(harness)
    assert page.total(f"{TTFT}_count") == page.total(f"{DURATION}_count") == 1
    assert endings(page) == {("chat", "completed", ""): 1}


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED, Outcome.COMPLETED])
async def test_request_without_a_token_has_no_first_one(harness: Harness, outcome: Outcome) -> None:
    asking, request = await harness.start_chat()
    await request.accept()
    await (request.finish() if outcome is Outcome.COMPLETED else request.close(outcome))
    await asking
    page = await scrape(harness)
    assert page.total(f"{TTFT}_count") == page.total(f"{TPOT}_count") == 0
    assert page.total(f"{DURATION}_count") == 1


async def test_every_ending_is_counted_once(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await request.finish(FinishReason.LENGTH)
    await request.finish()
    await response.text()
    asking, request = await harness.start_chat()
    await request.accept()
    await request.close(Outcome.FAILED, ErrorInfo(500, "server_error", "numbers", "Not a number.", None))
    await request.close(Outcome.FAILED)
    await asking
    asking, request = await harness.start_chat()
    await request.accept()
    asking.cancel()
    await harness.fake.next_cancellation()
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    for error in (InvalidRequest("Too long."), Overloaded("Full.")):
        asking, request = await harness.start_chat()
        await request.refuse(ErrorInfo.of(error))
        await request.refuse(ErrorInfo.of(error))
        await asking
    page = await scrape(harness)
    assert endings(page) == {
        ("chat", "completed", ""): 1,
        ("chat", "failed", "numbers"): 1,
        ("chat", "cancelled", ""): 1,
        ("chat", "refused", "invalid_value"): 1,
        ("chat", "refused", "queue_full"): 1,
    }
    assert page.value("shoal_gateway_requests_opened_total", operation="chat") == 5
    assert page.value("shoal_gateway_requests_open") == 0
    assert page.by(f"{DURATION}_count", "error_type") == dict.fromkeys(
        ("", "numbers", "cancelled", "invalid_value", "queue_full"), 1
    )
    assert page.by("shoal_gateway_tenant_requests_total", "ending") == {
        "completed": 1,
        "failed": 1,
        "cancelled": 1,
        "refused": 2,
    }


async def test_what_nobody_takes_in_time_counts_as_refused_and_as_sent_again(harness: Harness) -> None:
    asking = asyncio.create_task(harness.chat())
    await harness.fake.next_request()
    await harness.advance(30)
    assert (await asking)[0] == 503
    page = await scrape(harness)
    assert endings(page) == {("chat", "refused", "unavailable"): 1}
    assert page.value("shoal_gateway_resubmissions_total", reason="unanswered") == 3


async def test_refusals_at_the_door_are_counted_by_operation_and_code(harness: Harness) -> None:
    await harness.chat(model="other")
    await harness.chat(temperature=9)
    async with harness.post("/v1/completions", COMPLETION | {"temperature": 9}):
        pass
    async with harness.http.post(f"{harness.url}/v1/completions", data=b"{") as response:
        assert response.status == 400
    async with harness.post("/tokenize", {"model": "other", "prompt": "x"}), harness.http.get(f"{harness.url}/nothing"):
        pass  # these are no requests for output
    page = await scrape(harness)
    assert endings(page) == {
        ("chat", "refused", "model_not_found"): 1,
        ("chat", "refused", "invalid_value"): 1,
        ("text_completion", "refused", "invalid_value"): 2,
    }
    assert page.total("shoal_gateway_requests_opened_total") == page.total(f"{DURATION}_count") == 0


async def test_refusals_on_a_websocket_are_counted_too(harness: Harness) -> None:
    async with connected(harness, "shoal.v1.json") as peer:
        request = await peer.create(harness, "a")
        for name, body in (
            ("a", COMPLETION),
            ("b", CHAT | {"temperature": 9}),
            ("c", {"model": "test/model-1"}),
            ("d", CHAT | COMPLETION),
        ):
            await peer.send({"type": "request.create", "id": name, "body": body})
            await peer.receive()
        await peer.send({"type": "request.resume", "id": "e", "request_id": "req-unknown", "offset": 0})
        await harness.fake.next_search()
        await harness.advance(1.5)
        await peer.receive()
        await request.complete("x")
        await harness.nothing_is_left()
    assert endings(await scrape(harness)) == {
        ("text_completion", "refused", "duplicate_id"): 1,
        ("chat", "refused", "invalid_value"): 1,
        ("unknown", "refused", "invalid_value"): 2,
        ("chat", "completed", ""): 1,
    }


async def test_full_gateway_and_wrong_key_are_refusals() -> None:
    async with running_gateway(max_open_requests=1, api_keys=("acme:KEY",), metrics="on") as harness:
        key = {"Authorization": "Bearer KEY"}
        async with measured(harness), aiohttp.ClientSession(headers=key) as harness.http:
            asking, request = await harness.start_chat()
            assert (await harness.chat())[0] == 429
            await request.complete("x")
            await asking
            async with aiohttp.ClientSession() as stranger:
                await (await stranger.post(f"{harness.url}/v1/chat/completions", json=CHAT)).read()
            page = await scrape(harness)
    assert endings(page) == {
        ("chat", "refused", "queue_full"): 1,
        ("chat", "completed", ""): 1,
        ("chat", "refused", "invalid_api_key"): 1,
    }
    assert page.value("shoal_gateway_tenant_requests_total", tenant="acme", ending="completed") == 1


async def test_tokens_are_counted_by_request_and_by_tenant(harness: Harness) -> None:
    for num_tokens in (1, 6):
        response, request = await harness.open_stream(COMPLETION | {"n": 2}, "/v1/completions")
        await request.say("a", num_tokens=num_tokens)
        await request.say("b", index=1)
        await request.finish()
        await response.text()
    asking, request = await harness.start_chat()
    await request.refuse(ErrorInfo.of(Overloaded("Full.")))
    await asking
    page = await scrape(harness)
    tokens = {"model": "test/model-1", "type": "output"}
    assert page.value("shoal_gateway_request_tokens_sum", **tokens) == 9
    assert page.value("shoal_gateway_request_tokens_count", **tokens) == 2, "the third was refused"
    assert page.value("shoal_gateway_request_tokens_bucket", le="4.0", **tokens) == 1
    assert page.value("shoal_gateway_request_tokens_sum", model="test/model-1", type="input") == 6
    of_tenant = page.by("shoal_gateway_tenant_tokens_total", "type")
    assert of_tenant == {"input": 6, "cached": 4, "output": 9}


def test_only_so_many_tenants_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_MAX_TENANTS", 2)
    metrics = GatewayMetrics()
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.request_ended(make_account(tenant=tenant))
    assert {tenant: count for (tenant, _), count in metrics.tenant_requests.counts.items()} == {
        "a": 2,
        "b": 1,
        "_other": 2,
    }


async def test_resuming_counts_the_request_once_and_the_resumption(harness: Harness) -> None:
    request = await left_behind(harness, "Hel")
    async with connected(harness, "shoal.v1.json") as peer:
        await peer.send(resume(request, 3))
        await harness.until(lambda: bool(harness.mesh.metrics.resumed.counts))
        await request.say("lo")
        await request.finish()
        await rest(peer)
    page = await scrape(harness)
    assert endings(page) == {("chat", "completed", ""): 1}
    assert page.total("shoal_gateway_requests_opened_total") == page.total(f"{TTFT}_count") == 1
    assert page.by("shoal_gateway_resumptions_total", "place") == {"here": 1}
    assert page.value("shoal_gateway_disconnects_total") == 1


async def test_gateway_that_takes_a_request_over_counts_its_end_and_not_its_beginning() -> None:
    async with running_gateway() as first, running_gateway() as second, measured(second):
        peer, request = await begun(first, "a", "b")
        peer.vanish()
        await first.until(lambda: first.mesh.num_disconnects == 1)
        request._mesh = second.fake  # both gateways are on one broker in a real mesh
        second.fake.keep(request)
        async with connected(second, "shoal.v1.json") as reader:
            await reader.send(resume(request, 0))
            await second.until(lambda: len(second.mesh.requests) == 1)
            second.clock.advance(2)
            await request.say("c")
            await request.finish()
            texts, _ = await rest(reader)
            assert texts == {0: "abc"}
        page = await scrape(second)
        assert endings(page) == {("chat", "completed", ""): 1}
        assert page.by("shoal_gateway_resumptions_total", "place") == {"elsewhere": 1}
        assert page.total("shoal_gateway_requests_opened_total") == 0
        assert page.total(f"{TTFT}_count") == page.total(f"{TPOT}_count") == 0, "the first gateway told that"
        assert page.total("shoal_gateway_request_tokens_sum", type="output") == 3
        async with connected(second, "shoal.v1.json") as reader:
            await reader.send(resume(request, 0))
            await rest(reader)
        page = await scrape(second)
        assert endings(page) == {("chat", "completed", ""): 1}, "it had ended before it was looked for"
        assert page.by("shoal_gateway_resumptions_total", "place") == {"elsewhere": 2}


async def test_questions_and_moves_to_another_scheduler_are_counted(harness: Harness) -> None:
    response, request = await harness.open_stream(CHAT)
    await request.say("a")
    await harness.advance(2.5)
    await harness.fake.next_replay()
    await harness.fake.add_scheduler(InstanceId("scheduler-bbbbbbbb"))
    await harness.settle()
    await request.deny()
    await harness.settle()
    page = await scrape(harness)
    assert page.value("shoal_gateway_replays_total") >= 1
    assert page.value("shoal_gateway_resubmissions_total", reason="moved") == 1
    response.close()
