"""Every request as its collector sees it: one tree of spans from the client's call to the last token, however it ended.

Real services and a real OTLP receiver; each test has the whole tree written down.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from services.scheduler.config import SchedulerConfig
from shared.actor import Identity
from shared.ids import Service
from shared.telemetry.export import QueueExporter
from shared.telemetry.otlp import OtlpSender
from shared.telemetry.otlp_settings import OtlpSettings
from shared.telemetry.tracing import Exporter
from tests.integration.cast import Streamed, create, follow
from tests.integration.in_process import MODEL, FewBlocks, InProcessMesh, in_process_mesh, load_runner
from tests.integration.traces import (
    CHAT,
    COMPLETION,
    HEADERS,
    LONG,
    SERVED,
    SPAN_ID,
    TEXT,
    TRACE_ID,
    Exports,
    Row,
    below,
    check_tree,
    rows,
    timeline,
    until,
)
from tests.shared.telemetry.collector import Collector


@pytest.fixture
async def mesh(folder: Path, runners: list[ModelRunner], exports: Exports) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh(folder, runners[0], exporters=exports) as mesh:
        yield mesh


async def test_a_completed_stream(mesh: InProcessMesh, exports: Exports) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 20, "stream": True}
    body |= {"ignore_eos": True, "seed": 1}
    async with mesh.session.post(f"{mesh.url}/v1/chat/completions", json=body, headers=HEADERS) as answer:
        request_id = answer.headers["X-Request-Id"]
        await answer.read()
    await mesh.until_idle()
    told = await timeline(mesh, request_id)
    tree = await exports.tree(TRACE_ID)
    check_tree(tree, below(CHAT, *SERVED, ("detokenizer", "detokenize")))
    spans = {span.name: span for span in tree}
    root, prefill, decode = spans[CHAT], spans["prefill"], spans["decode"]
    assert (root.parent_id, root.kind, root.state) == (SPAN_ID, "SERVER", "vendor=1")
    assert root.attributes["gen_ai.usage.output_tokens"] == 20
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["shoal.request.id"] == request_id
    assert prefill.attributes["shoal.prefill.tokens"] == root.attributes["gen_ai.usage.input_tokens"]
    assert decode.attributes["shoal.decode.steps"] == decode.attributes["shoal.decode.tokens"] == 20
    assert spans["tokenize"].end_ns <= spans["queue"].end_ns <= decode.start_ns
    # The steps are traces of their own, with links to this one.
    steps = exports.collector.named("step")
    assert len(steps) == 20
    assert {step.links for step in steps} == {((TRACE_ID, root.span_id),)}
    assert len({step.trace_id for step in steps} | {TRACE_ID}) == 21
    assert {(step.parent_id, step.service) for step in steps} == {("", "shoal-executor")}
    assert steps[0].attributes["shoal.step.tokens"] == prefill.attributes["shoal.prefill.tokens"]
    # And the mesh itself tells the same.
    assert told["spans"][0]["name"] == CHAT
    assert {span["span_id"] for span in told["spans"]} == {span.span_id for span in tree}
    assert told["trace_id"] == TRACE_ID
    assert [(each["instance"], each["num_steps"], len(each["steps"])) for each in told["steps"]] == [
        ("executor-1", 20, 20)
    ]
    assert len(told["instances"]["answered"]) == 5


async def test_a_websocket_with_several_requests(mesh: InProcessMesh, exports: Exports) -> None:
    async with mesh.session.ws_connect(f"{mesh.url}/v1/stream", headers=HEADERS) as socket:
        streamed = [Streamed(), Streamed()]
        own = f"00-{'c' * 32}-{'d' * 16}-01"
        await socket.send_json(create(0, LONG | {"max_tokens": 5}))
        await socket.send_json(create(1, LONG | {"max_tokens": 5, "n": 2, "prompt": "Once"}) | {"traceparent": own})
        await follow(socket, streamed)
    await mesh.until_idle()
    first, second = await exports.tree(TRACE_ID), await exports.tree("c" * 32)
    check_tree(first, below(COMPLETION, *SERVED, ("detokenizer", "detokenize")))
    assert rows(second) == sorted(
        below(COMPLETION, *SERVED, ("scheduler", "prefill"), ("detokenizer", "detokenize")),
        key=lambda row: (row[2] is not None, row),
    ), "the second choice computes the last token of the prompt"
    assert {span.attributes["shoal.request.id"] for span in second} == {streamed[1].request_id}


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "expected"),
    [
        ("chat/completions", {"messages": []}, 400, "invalid_value", [("gateway", "chat", None)]),
        (
            "completions",
            {"prompt": "x", "model": "no"},
            404,
            "model_not_found",
            [("gateway", "text_completion no", None)],
        ),
        (
            *("completions", {"prompt": TEXT * 200}, 400, "context_length_exceeded"),
            below(COMPLETION, ("tokenizer", "tokenize")),
        ),
        (
            *("completions", {"prompt": TEXT, "max_tokens": 10, "n": 16, "logit_bias": {"99999": 1}}, 400),
            *("invalid_value", below(COMPLETION, ("tokenizer", "tokenize"))),
        ),
    ],
)
async def test_refusals(
    mesh: InProcessMesh, exports: Exports, path: str, body: Any, status: int, code: str, expected: list[Row]
) -> None:
    await mesh.until_models_are_known()
    body = {"model": MODEL, **body}
    async with mesh.session.post(f"{mesh.url}/v1/{path}", json=body, headers=HEADERS) as answer:
        assert answer.status == status, await answer.text()
        request_id = answer.headers["X-Request-Id"]
    await mesh.until_idle()
    told = await timeline(mesh, request_id)
    tree = await exports.tree(TRACE_ID)
    check_tree(tree, expected)
    assert all(span.attributes["error.type"] == code for span in tree)
    assert tree[0].attributes["http.response.status_code"] == status
    assert len(told["spans"]) == len(tree)


async def test_a_full_queue(folder: Path, runners: list[ModelRunner], exports: Exports) -> None:
    few = ExecutorConfig(max_slots=1, threads=1, kv_cache_mb=32)
    runner = load_runner(folder, few)
    settings = SchedulerConfig(max_waiting_requests=1)
    async with in_process_mesh(folder, runner, scheduler=settings, exporters=exports) as mesh:
        async with mesh.session.ws_connect(f"{mesh.url}/v1/stream") as socket:
            await socket.send_json(create(0, LONG))
            await until(socket, "request.delta")
            await socket.send_json(create(1, LONG))
            await until(socket, "request.accepted")
            body = {"model": MODEL, "prompt": TEXT}
            async with mesh.session.post(f"{mesh.url}/v1/completions", json=body, headers=HEADERS) as answer:
                assert answer.status == 429
        await mesh.until_idle()
        tree = await exports.tree(TRACE_ID)
    check_tree(tree, below(COMPLETION, ("tokenizer", "tokenize"), ("scheduler", "queue")))
    assert [span.attributes.get("error.type") for span in tree] == ["queue_full", None, "queue_full"]
    assert tree[0].attributes["http.response.status_code"] == 429


async def test_a_deadline(mesh: InProcessMesh, exports: Exports) -> None:
    body = {"model": MODEL, **LONG, "timeout_ms": 300}
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=body, headers=HEADERS) as answer:
        assert answer.status == 504
    await mesh.until_idle()
    tree = await exports.tree(TRACE_ID)
    check_tree(tree, below(COMPLETION, *SERVED, ("detokenizer", "detokenize")))
    errors = {span.name: span.attributes["error.type"] for span in tree if span.is_error}
    assert errors == {COMPLETION: "deadline_exceeded", "decode": "deadline_exceeded"}
    assert tree[0].attributes["http.response.status_code"] == 504


async def test_a_cancelled_request(mesh: InProcessMesh, exports: Exports) -> None:
    async with mesh.session.ws_connect(f"{mesh.url}/v1/stream", headers=HEADERS) as socket:
        await socket.send_json(create(0, LONG))
        await until(socket, "request.delta")
        await socket.send_json({"type": "request.cancel", "id": "0"})
        await until(socket, "request.cancelled")
    await mesh.until_idle()
    tree = await exports.tree(TRACE_ID)
    check_tree(tree, below(COMPLETION, *SERVED, ("detokenizer", "detokenize")))
    outcomes = {span.name: span.attributes.get("shoal.outcome") for span in tree}
    assert (outcomes[COMPLETION], outcomes["decode"], outcomes["detokenize"]) == ("cancelled",) * 3
    assert not any(span.is_error for span in tree)


async def test_a_preempted_request(folder: Path, runners: list[ModelRunner], exports: Exports) -> None:
    """There is room for one output to grow, so the later of two gives way and is computed again."""
    few = FewBlocks(runners[0], 12)
    async with in_process_mesh(folder, few, exporters=exports) as mesh:
        size = few.capacity.block_size
        body = {"prompt": "ab", "max_tokens": 8 * size, "ignore_eos": True}
        async with mesh.session.ws_connect(f"{mesh.url}/v1/stream", headers=HEADERS) as socket:
            streamed = [Streamed(), Streamed()]
            await socket.send_json(create(0, body) | {"traceparent": "none"})
            await socket.send_json(create(1, body | {"prompt": "xyz"}))
            await follow(socket, streamed)
        await mesh.until_idle()
        told = await timeline(mesh, streamed[1].request_id)
        tree = await exports.tree(TRACE_ID)
    num_preempted = sum(span.name == "preempted" for span in tree)
    assert num_preempted >= 1
    assert [span.name for span in tree].count("prefill") == 1 + num_preempted
    extra = [("scheduler", "preempted"), ("scheduler", "prefill")] * num_preempted
    check_tree(tree, below(COMPLETION, *SERVED, *extra, ("detokenizer", "detokenize")))
    assert {span["name"] for span in told["spans"]} >= {"preempted", "decode"}
    decode = next(span for span in tree if span.name == "decode")
    for span in tree:
        if span.name == "preempted":
            assert decode.start_ns <= span.start_ns <= span.end_ns <= decode.end_ns


# Collectors.


@pytest.mark.parametrize("status", [500, 200])
async def test_requests_do_not_care_for_a_collector_that_is_broken_or_slow(
    folder: Path, runners: list[ModelRunner], collector: Collector, status: int
) -> None:
    settings = OtlpSettings(collector.traces_url, timeout_s=1.0)
    collector.status, collector.delay_s = status, 3600.0 if status == 200 else 0.0
    exporters = []

    def few(identity: Identity) -> Exporter:
        sender = OtlpSender(settings, {"service.name": f"shoal-{identity.service}"}, "0")
        exporters.append(QueueExporter(sender, max_waiting=4, pause_s=0.01))
        return exporters[-1]

    async with in_process_mesh(folder, runners[0], exporters=few) as mesh:
        async with asyncio.timeout(60):
            await asyncio.gather(*(mesh.complete(prompt=TEXT, max_tokens=20, seed=seed) for seed in range(20)))
        await mesh.until_idle()
        assert sum(exporter.num_dropped for exporter in exporters) > 0
        assert mesh.tracings[Service.GATEWAY].store.num_requests == 20, "what is kept is kept"
        for exporter in exporters:
            await asyncio.to_thread(exporter.close, 0.1)


async def test_only_what_is_sampled_is_exported_and_everything_is_kept(
    folder: Path, runners: list[ModelRunner], exports: Exports
) -> None:
    async with in_process_mesh(folder, runners[0], exporters=exports, sample_ratio=0.0) as mesh:
        request_id = ""
        await mesh.complete(prompt=TEXT, max_tokens=3)
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 3}
        not_sampled = {"traceparent": f"00-{'e' * 32}-{SPAN_ID}-00"}
        for headers in (HEADERS, not_sampled):
            async with mesh.session.post(f"{mesh.url}/v1/completions", json=body, headers=headers) as answer:
                request_id = answer.headers["X-Request-Id"]
        await mesh.until_idle()
        told = await timeline(mesh, request_id)
        await exports.tree(TRACE_ID)
    assert told["trace_id"] == "e" * 32
    assert {span.trace_id for span in exports.collector.spans if span.name != "step"} == {TRACE_ID}
    assert {links for step in exports.collector.named("step") for links in step.links} == {
        (TRACE_ID, exports.collector.named(COMPLETION)[0].span_id)
    }


async def test_nothing_is_left_open_in_any_service(mesh: InProcessMesh) -> None:
    bodies = [LONG | {"max_tokens": count, "n": 2, "seed": count} for count in (1, 5, 40)]
    streamed = await mesh.stream_all(bodies)
    await mesh.until_idle()
    for stream in streamed:
        assert stream.end is not None
        for tracing in mesh.tracings.values():
            for open_spans in tracing.open_spans:
                assert list(open_spans(stream.end["request_id"])) == []
    gateway, scheduler = mesh.gateway.mesh.spans, mesh.scheduler._spans
    assert not gateway._following
    assert not scheduler._traced
    assert not any(planned for planned in scheduler._planned.values())
    assert not mesh.executor._spans._planned
