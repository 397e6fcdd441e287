"""Every request as its collector sees it: one tree of spans from the client's call to the last token, however it ended.

Real services and a real OTLP receiver; each test has the whole tree written down.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
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
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.integration.cast import Cast, Player, Streamed, cast, create, follow, resume
from tests.integration.in_process import MODEL, FewBlocks, InProcessMesh, in_process_mesh, load_runner
from tests.telemetry.collector import Collector, Told, collecting
from tests.tiny_models import make_tiny_model

TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
CHAT, COMPLETION = f"chat {MODEL}", f"text_completion {MODEL}"
LONG = {"prompt": TEXT, "max_tokens": 1500, "ignore_eos": True}

Row = tuple[str, str, str | None]
"""Who tells of a span, what it is called, and the name of the one above it; None at the top."""


def below(root: str, *rows: tuple[str, str]) -> list[Row]:
    """A server span at the top, and the others below it."""
    return [("gateway", root, None), *((service, name, root) for service, name in rows)]


SERVED = (("tokenizer", "tokenize"), ("scheduler", "queue"), ("scheduler", "prefill"), ("scheduler", "decode"))


class Exports:
    """Makes exporters to one collector, and has them send all they have."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._exporters: list[QueueExporter] = []

    def __call__(self, identity: Identity) -> Exporter:
        resource = {"service.name": f"shoal-{identity.service}", "service.instance.id": identity.instance_id}
        exporter = QueueExporter(OtlpSender(OtlpSettings(self.collector.address), resource, "0"), pause_s=0.05)
        self._exporters.append(exporter)
        return exporter

    async def tree(self, trace_id: str) -> list[Told]:
        """All spans of a trace, by start, once everybody has sent what it had."""
        for exporter in self._exporters:
            await asyncio.to_thread(exporter.close, 30.0)
            assert exporter.num_dropped == 0
        found = [span for span in self.collector.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)


def rows(tree: list[Told]) -> list[Row]:
    """The tree as it is written down in the tests."""
    by_id = {span.span_id: span.name for span in tree}
    return sorted(
        ((s.service.removeprefix("shoal-"), s.name, by_id.get(s.parent_id)) for s in tree),
        key=lambda row: (row[2] is not None, row),
    )


def check_tree(tree: list[Told], expected: list[Row]) -> None:
    """The tree is as written down, in one piece, every span within time, and no text of anybody in it."""
    assert rows(tree) == sorted(expected, key=lambda row: (row[2] is not None, row))
    (root,) = [span for span in tree if span.kind == "SERVER" and not span.name.startswith("resume")]
    for span in tree:
        assert root.start_ns <= span.start_ns <= span.end_ns, span
        assert span.is_error is ("error.type" in span.attributes)
        assert TEXT[:9] not in repr(span)
    assert root.parent_id in ("", SPAN_ID)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def runners(folder: Path) -> list[ModelRunner]:
    return [load_runner(folder, ExecutorConfig(max_slots=16, threads=1, kv_cache_mb=32)) for _ in range(2)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def exports(collector: Collector) -> Exports:
    return Exports(collector)


@pytest.fixture
async def mesh(folder: Path, runners: list[ModelRunner], exports: Exports) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh(folder, runners[0], exporters=exports) as mesh:
        yield mesh


async def timeline(mesh: InProcessMesh | Cast, request_id: str) -> dict[str, Any]:
    """What the gateway says of a request."""
    url = mesh.url() if isinstance(mesh, Cast) else mesh.url
    async with mesh.session.get(f"{url}/v1/requests/{request_id}/trace?steps=true") as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def until(socket: aiohttp.ClientWebSocketResponse, kind: str) -> None:
    """Take messages up to one of a kind."""
    while (await socket.receive_json(timeout=20))["type"] != kind:
        pass


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


# Whatever dies.


@pytest.fixture
async def large_mesh(folder: Path, runners: list[ModelRunner], exports: Exports) -> AsyncIterator[Cast]:
    broker = MemoryBroker()
    async with cast(folder, runners, lambda _name: MemoryTransport(broker), exporters=exports) as mesh:
        yield mesh


async def stream_through(mesh: Cast, trouble: Callable[[list[Streamed]], Any]) -> Streamed:
    """A request with a trace, during which something happens once it has some tokens."""

    async def disturb(streamed: list[Streamed]) -> None:
        await mesh.until(lambda: streamed[0].num_tokens > 5)
        await trouble(streamed)

    streamed = [Streamed()]
    disturbing = asyncio.create_task(disturb(streamed))
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream", headers=HEADERS) as socket:
        await socket.send_json(create(0, LONG | {"max_tokens": 400}))
        await follow(socket, streamed)
    await disturbing
    assert streamed[0].end is not None
    assert streamed[0].end["type"] == "request.completed"
    return streamed[0]


def executor_in_use(mesh: Cast) -> Player:
    return max(mesh.of(Service.EXECUTOR), key=lambda one: one.status.num_steps)


async def test_an_executor_that_is_lost(large_mesh: Cast, exports: Exports) -> None:
    """With one scheduler, which goes on with the other executor."""
    mesh = large_mesh
    await mesh.of(Service.SCHEDULER)[1].leave(deadline_s=0.0)
    await mesh.until(lambda: len(mesh.of(Service.SCHEDULER)[0].status.executors) == 2)
    lost = ""

    async def kill(_streamed: list[Streamed]) -> None:
        nonlocal lost
        player = executor_in_use(mesh)
        lost = player.actor.identity.instance_id
        await player.kill()

    stream = await stream_through(mesh, kill)
    await mesh.until_nothing_is_left()
    told = await timeline(mesh, stream.request_id)
    tree = await exports.tree(TRACE_ID)
    executors = [span.attributes["shoal.executor.id"] for span in tree if span.name == "prefill"]
    assert executors[0] == lost
    assert lost not in executors[1:], "prompt and output so far are computed once more, in one part or several"
    again = [("scheduler", "prefill")] * len(executors[1:])
    check_tree(tree, below(COMPLETION, *SERVED, ("scheduler", "migration"), *again, ("detokenizer", "detokenize")))
    (migration,) = [span for span in tree if span.name == "migration"]
    assert migration.attributes["shoal.reason"] == "executor_lost"
    assert migration.attributes["shoal.executor.id"] == lost
    (decode,) = [span for span in tree if span.name == "decode"]
    assert decode.attributes["shoal.executor.id"] == executors[-1]
    assert decode.start_ns < migration.start_ns < migration.end_ns < decode.end_ns
    assert tree[0].attributes["gen_ai.usage.output_tokens"] == 400
    assert told["instances"]["gone"] == [lost]
    assert [steps["instance_id"] for steps in told["steps"]] == [executors[-1]]


async def test_a_scheduler_that_is_lost(large_mesh: Cast, exports: Exports) -> None:
    mesh = large_mesh

    async def kill(_streamed: list[Streamed]) -> None:
        await mesh.holder().kill()

    stream = await stream_through(mesh, kill)
    await mesh.until_nothing_is_left()
    told = await timeline(mesh, stream.request_id)
    tree = await exports.tree(TRACE_ID)
    root = next(span for span in tree if span.kind == "SERVER")
    resubmission = next(span for span in tree if span.name == "resubmission")
    assert resubmission.attributes["shoal.reason"] == "scheduler_lost"
    assert resubmission.attributes["shoal.attempt"] == root.attributes["shoal.attempt"] == 2
    assert resubmission.attributes["shoal.scheduler.id"] == root.attributes["shoal.scheduler.id"]
    attempts = {(span.name, span.attributes["shoal.attempt"]) for span in tree if span.name in ("tokenize", "queue")}
    assert attempts == {("tokenize", 1), ("queue", 1), ("tokenize", 2), ("queue", 2)}
    (decode,) = [span for span in tree if span.name == "decode"]
    assert decode.attributes["shoal.attempt"] == 2, "what the lost one was doing, nobody tells"
    assert {span.parent_id for span in tree} == {SPAN_ID, root.span_id}
    assert len(told["instances"]["gone"]) == 1


async def test_a_gateway_that_is_lost(large_mesh: Cast, exports: Exports) -> None:
    mesh = large_mesh
    streamed = [Streamed()]
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream", headers=HEADERS) as socket:
        await socket.send_json(create(0, LONG))
        while streamed[0].num_tokens < 5:
            message = await socket.receive_json(timeout=20)
            if message["type"] == "request.accepted":
                streamed[0].request_id = message["request_id"]
            else:
                streamed[0].take(message)
        killed = mesh.of(Service.GATEWAY)[0]
        await killed.kill()
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream") as socket:
        await socket.send_json(resume(0, streamed[0]))
        await follow(socket, streamed)
    await mesh.until_nothing_is_left()
    told = await timeline(mesh, streamed[0].request_id)
    tree = [  # what it says here while it goes, a process that is killed does not
        span
        for span in await exports.tree(TRACE_ID)
        if span.resource["service.instance.id"] != killed.actor.identity.instance_id
    ]
    (resumed,) = [span for span in tree if span.name == f"resume {MODEL}"]
    assert resumed.kind == "SERVER"
    assert resumed.attributes["shoal.outcome"] == "completed"
    parents = {span.parent_id for span in tree}
    assert len(parents) == 1, "all are below the span that died with its gateway"
    assert resumed.span_id not in parents
    assert {span["name"] for span in told["spans"]} >= {"tokenize", "decode", f"resume {MODEL}"}


# Collectors.


@pytest.mark.parametrize("status", [500, 200])
async def test_requests_do_not_care_for_a_collector_that_is_broken_or_slow(
    folder: Path, runners: list[ModelRunner], collector: Collector, status: int
) -> None:
    settings = OtlpSettings(collector.address, timeout_s=1.0)
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
