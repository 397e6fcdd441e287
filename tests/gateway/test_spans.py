"""The gateway's span of each request: what was asked, what came of it, and that there is one whatever happens."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import pytest

from shared.messages import FinishReason, Span, TraceContext
from shared.telemetry import names
from shared.telemetry.export import Loss, QueueExporter
from shared.telemetry.tracing import Tracing
from tests.gateway.fake_mesh import MODEL
from tests.gateway.following import HEADERS, PARENT, SPAN_ID, TRACE_ID, going_on, only, spans
from tests.gateway.harness import CHAT, COMPLETION, Harness, events_of, running_gateway
from tests.gateway.peers import Peer, connected

# What it says.


async def test_a_chat_is_told_of_in_the_words_of_the_conventions(harness: Harness) -> None:
    body = CHAT | {
        "max_tokens": 50,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ["\n\n", "END"],
        "n": 2,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "priority": 3,
    }
    response, request = await harness.open_stream(body)
    await request.say("secret words")
    await request.say("more of them", index=1)
    await harness.settle()
    await request.finish(FinishReason.LENGTH)
    await events_of(response)
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.name == f"chat {MODEL}"
    said = dict(span.attributes)
    first = said.pop(names.TIME_TO_FIRST_CHUNK)
    assert isinstance(first, float)
    assert 0 < first < (span.end_ns - span.start_ns) / 1e9
    host, port = harness.url.removeprefix("http://").split(":")
    assert said == {
        "server.address": host,
        "server.port": int(port),
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("\n\n", "END"),
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.frequency_penalty": -0.5,
        "gen_ai.request.stream": True,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": request.request_id.replace("req-", "chatcmpl-"),
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "shoal.tenant": "default",
        "shoal.priority": 3,
        "shoal.attempt": 1,
        "shoal.outcome": "completed",
        "shoal.delivery.deltas": said["shoal.delivery.deltas"],
        "shoal.scheduler.id": harness.fake.scheduler_id,
        "shoal.detokenizer.id": harness.fake.detokenizer_id,
    }
    assert said["shoal.delivery.deltas"] in (3, 4), "the texts of two choices, and their ends"
    assert "secret" not in repr(span)
    assert "Hi" not in repr(span)


async def test_what_nobody_asked_for_is_not_said(harness: Harness) -> None:
    asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/completions", json=COMPLETION))
    request = await harness.fake.next_request()
    await request.complete(" upon a time")
    await (await asking).read()
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.name == f"text_completion {MODEL}"
    assert span.attributes["gen_ai.response.id"] == request.request_id.replace("req-", "cmpl-")
    asked = {name for name in span.attributes if name.startswith("gen_ai.request.")}
    assert asked == {f"gen_ai.request.{name}" for name in ("model", "max_tokens", "temperature", "top_p")}
    for absent in (names.TIME_TO_FIRST_CHUNK, names.NUM_DELTAS, names.REQUEST_SEED, names.ERROR_TYPE):
        assert absent not in span.attributes


async def test_no_name_is_one_that_the_conventions_have_given_up(harness: Harness) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as conventions

    known = {
        value for name, value in vars(conventions).items() if name.startswith("GEN_AI_") and isinstance(value, str)
    }
    ours = {value for value in vars(names).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    assert ours <= known
    assert not ours & {"gen_ai.system", "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"}
    assert not any(re.search(r"openai|prompt|completion|messages|instructions", name) for name in ours)


async def test_prompts_of_one_body_are_one_span_until_the_last_has_ended(harness: Harness) -> None:
    body = COMPLETION | {"prompt": ["a", "b"]}
    asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/completions", json=body))
    first, second = await harness.fake.next_request(), await harness.fake.next_request()
    assert second.request_id == f"{first.request_id}-1"
    assert first.message.trace == second.message.trace
    await first.complete("1")
    await harness.settle()
    assert spans(harness, first.request_id) == []
    assert going_on(harness, first.request_id) == [f"text_completion {MODEL}"]
    await second.complete("2")
    await (await asking).read()
    await harness.nothing_is_left()
    span = only(harness, first.request_id)
    assert span.attributes[names.NUM_PROMPTS] == 2
    assert (span.attributes[names.INPUT_TOKENS], span.attributes[names.OUTPUT_TOKENS]) == (6, 2)
    assert going_on(harness, first.request_id) == []


# Where it belongs.


async def test_a_clients_trace_goes_on_through_the_mesh(harness: Harness) -> None:
    asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/chat/completions", json=CHAT, headers=HEADERS))
    request = await harness.fake.next_request()
    await request.complete("Hello")
    await (await asking).read()
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert span.context == PARENT
    assert request.message.trace == TraceContext(PARENT.trace_id, span.span_id, True, "vendor=1")


@pytest.mark.parametrize("headers", [{}, {"traceparent": "00-nonsense", "tracestate": "vendor=1"}])
async def test_without_a_trace_of_the_clients_one_begins(harness: Harness, headers: dict[str, str]) -> None:
    asking = asyncio.create_task(harness.http.post(f"{harness.url}/v1/chat/completions", json=CHAT, headers=headers))
    request = await harness.fake.next_request()
    await request.complete("Hello")
    await (await asking).read()
    await harness.nothing_is_left()
    span = only(harness, request.request_id)
    assert (span.context.span_id, span.context.state, span.context.is_sampled) == (b"", "", True)
    assert request.message.trace is not None
    assert request.message.trace.span_id == span.span_id


async def test_on_a_websocket_a_request_may_have_a_trace_of_its_own(harness: Harness) -> None:
    own = f"00-{'a' * 32}-{'b' * 16}-00"
    async with connected(harness, headers=HEADERS) as peer:
        first = await peer.create(harness, "a")
        second = await peer.create(harness, "b", traceparent=own, tracestate="mine=2")
        third = await peer.create(harness, "c", traceparent="nonsense")
        for request in (first, second, third):
            await request.finish()
            assert (await peer.receive())["type"] == "request.completed"
        await harness.nothing_is_left()
    assert only(harness, first.request_id).context == PARENT
    context = only(harness, second.request_id).context
    assert (context.trace_id.hex(), context.span_id.hex(), context.is_sampled) == ("a" * 32, "b" * 16, False)
    assert context.state == "mine=2"
    assert only(harness, third.request_id).context.span_id == b"", "not that of the connection either"


async def test_a_trace_of_the_wrong_type_is_a_wrong_message(harness: Harness, peer: Peer) -> None:
    await peer.send({"type": "request.create", "id": "a", "body": CHAT, "traceparent": 7})
    error = await peer.receive()
    assert (error["type"], error["error"]["param"]) == ("error", "traceparent")


async def test_where_nobody_is_followed_the_mesh_is_told_of_no_trace() -> None:
    async with running_gateway(tracing=Tracing()) as harness:
        asking = asyncio.create_task(
            harness.http.post(f"{harness.url}/v1/chat/completions", json=CHAT, headers=HEADERS)
        )
        request = await harness.fake.next_request()
        assert request.message.trace is None
        await request.complete("Hello")
        assert (await asking).status == 200
        assert harness.mesh.spans._following == {}


async def test_what_is_neither_kept_nor_exported_is_not_followed() -> None:
    async with running_gateway(tracing=Tracing(exporter=QueueExporter(_Nowhere()))) as harness:
        not_sampled = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
        for headers, is_followed in ((not_sampled, False), (HEADERS, True)):
            posting = harness.http.post(f"{harness.url}/v1/chat/completions", json=CHAT, headers=headers)
            asking = asyncio.create_task(_status(posting))
            request = await harness.fake.next_request()
            assert (request.message.trace is not None) is is_followed
            await request.complete("Hello")
            assert await asking == 200
        harness.tracing.close(10.0)


async def _status(posting: Any) -> int:
    async with posting as response:
        status: int = response.status
        return status


class _Nowhere:
    def send(self, spans: Sequence[Span]) -> Loss | None:
        return None

    def give_up(self) -> None:
        pass
