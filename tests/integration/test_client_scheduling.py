"""What clients say about scheduling and choosing, through the whole mesh: deadlines, priorities, `best_of`."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from tests.integration.in_process import MODEL, PATIENCE_S, InProcessMesh, in_process_mesh, load_runner

ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "The river", "max_tokens": 2000, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, ExecutorConfig(max_slots=1, threads=1, kv_cache_mb=16))


@pytest.fixture
async def mesh(folder: Path, runner: ModelRunner) -> AsyncIterator[InProcessMesh]:
    """Its executor runs one choice at a time."""
    async with in_process_mesh(folder, runner) as mesh:
        yield mesh
        await mesh.until_idle()


async def ask(mesh: InProcessMesh, **fields: Any) -> tuple[int, Any]:
    async with mesh.session.post(f"{mesh.url}/v1/completions", json=ENDLESS | fields) as answer:
        return answer.status, await answer.json()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # the services set no event of ours
            await asyncio.sleep(0.005)


async def test_a_request_in_the_queue_and_one_that_runs_end_when_their_time_is_over(mesh: InProcessMesh) -> None:
    texts = [await text_until_time_is_over(mesh, timeout_ms=900)]
    if not texts[0]:  # so busy a machine may need longer for a first word
        texts.append(await text_until_time_is_over(mesh, timeout_ms=5000))
    assert texts[-1]


async def text_until_time_is_over(mesh: InProcessMesh, timeout_ms: int) -> str:
    """What is said in so much time, while another request waits longer than it may."""
    runs, waits = await asyncio.gather(
        mesh.session.post(
            f"{mesh.url}/v1/completions", json=ENDLESS | {"stream": True, "timeout_ms": timeout_ms, "priority": 0}
        ),
        ask(mesh, timeout_ms=100, priority=1),
    )
    assert (waits[0], waits[1]["error"]["code"]) == (504, "deadline_exceeded")
    async with runs as answer:
        if answer.status != 200:  # its time was over before it had begun
            return ""
        events = [line[6:] async for line in answer.content if line.startswith(b"data: ")]
    assert events[-1].strip() == b"[DONE]"
    documents = [json.loads(event) for event in events[:-1]]
    assert documents[-1]["error"]["code"] == "deadline_exceeded"
    return "".join(document["choices"][0]["text"] for document in documents[:-1])


async def test_best_of_gives_the_likeliest_of_all_choices(mesh: InProcessMesh) -> None:
    _, everything = await ask(mesh, n=6, logprobs=0, max_tokens=8)
    _, best = await ask(mesh, n=2, best_of=6, max_tokens=8)

    def mean(choice: Any) -> float:
        logprobs: list[float] = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    ranked = sorted(everything["choices"], key=mean, reverse=True)
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert [choice["logprobs"] for choice in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"] == 48


async def test_the_better_priority_is_served_first(mesh: InProcessMesh) -> None:
    done: list[str] = []

    async def one(name: str, **fields: Any) -> None:
        assert (await ask(mesh, **fields))[0] == 200
        done.append(name)

    first = asyncio.create_task(one("first"))
    await until(lambda: mesh.scheduler.status().num_running == 1)
    others = [asyncio.create_task(one(str(number), max_tokens=20, priority=number)) for number in (30, 20, 10)]
    await until(lambda: mesh.scheduler.status().num_waiting == 3)
    await asyncio.gather(first, *others)
    assert done == ["first", "10", "20", "30"]
