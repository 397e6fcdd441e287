"""Traces of requests whose executor, scheduler or gateway dies: still one tree, which says what happened."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.executor.model_runner import ModelRunner
from shared.ids import Service
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.integration.cast import Cast, Player, Streamed, cast, create, follow, resume
from tests.integration.in_process import MODEL
from tests.integration.traces import (
    COMPLETION,
    HEADERS,
    LONG,
    SERVED,
    SPAN_ID,
    TRACE_ID,
    Exports,
    below,
    check_tree,
    of_survivors,
    timeline,
)

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
    tree = of_survivors(await exports.tree(TRACE_ID))
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
        await mesh.of(Service.GATEWAY)[0].kill()
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream") as socket:
        await socket.send_json(resume(0, streamed[0]))
        await follow(socket, streamed)
    await mesh.until_nothing_is_left()
    told = await timeline(mesh, streamed[0].request_id)
    tree = of_survivors(await exports.tree(TRACE_ID))
    (resumed,) = [span for span in tree if span.name == f"resume {MODEL}"]
    assert resumed.kind == "SERVER"
    assert resumed.attributes["shoal.outcome"] == "completed"
    parents = {span.parent_id for span in tree}
    assert len(parents) == 1, "all are below the span that died with its gateway"
    assert resumed.span_id not in parents
    assert {span["name"] for span in told["spans"]} >= {"tokenize", "decode", f"resume {MODEL}"}
