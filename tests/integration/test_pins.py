"""A pinned system prompt through the whole mesh: the first chat that uses it computes only the rest."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from shared.cli.mesh.pins import MeshPins
from shared.ids import DEFAULT_TENANT
from shared.messages import PinnedPrefix
from shared.transport.memory import MemoryTransport
from tests.integration.in_process import MODEL, PATIENCE_S, InProcessMesh, load_runner

SYSTEM = "You are the miller's clerk. You count sacks, carts and days, and you answer in whole numbers. " * 4


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, ExecutorConfig(max_slots=16, threads=1, kv_cache_mb=64))


@pytest.fixture
async def pins(mesh: InProcessMesh) -> AsyncIterator[MeshPins]:
    transport = MemoryTransport(mesh.broker)
    await transport.connect()
    yield MeshPins(transport)
    await transport.close()


async def num_cached_tokens(mesh: InProcessMesh, user: str) -> int:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}],
        "max_tokens": 4,
    }
    async with mesh.session.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return int((await answer.json())["usage"]["prompt_tokens_details"]["cached_tokens"])


async def until_pinned(mesh: InProcessMesh, num_blocks: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while mesh.scheduler.status().executors[0].num_pinned_blocks != num_blocks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_first_chat_with_a_pinned_system_prompt_finds_it(
    mesh: InProcessMesh, pins: MeshPins, runner: ModelRunner
) -> None:
    tokens = await pins.system_prompt_tokens(MODEL, SYSTEM)
    num_blocks = len(tokens) // runner.capacity.block_size
    assert num_blocks > 4
    await pins.put("clerk", PinnedPrefix(MODEL, DEFAULT_TENANT, tokens))
    await until_pinned(mesh, num_blocks)
    assert await num_cached_tokens(mesh, "How many sacks?") >= num_blocks * runner.capacity.block_size
    await pins.delete("clerk")
    await until_pinned(mesh, 0)
    assert await pins.all() == {}


async def test_the_tokens_of_a_raw_text_begin_every_prompt_that_begins_with_it(
    mesh: InProcessMesh, pins: MeshPins
) -> None:
    tokens = await pins.text_tokens(MODEL, SYSTEM)
    longer = await pins.text_tokens(MODEL, SYSTEM + " And now to work, said the miller.")
    assert len(tokens) > 50
    assert longer[: len(tokens)] == tokens
