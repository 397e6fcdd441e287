"""Starts an executor: `python -m services.executor`. Its settings are listed by `--settings`."""

import asyncio
from pathlib import Path

from services.executor.config import ExecutorConfig
from services.executor.memory import give_back_unused
from services.executor.service import Executor
from services.executor.step_thread import Runner
from shared.ids import Service
from shared.models.store import ModelStore
from shared.process import Parts, run


async def build(parts: Parts[ExecutorConfig]) -> Executor:
    """The actor with its model loaded, every kernel having run once."""
    folder = ModelStore(parts.mesh.home).folder(parts.mesh.model)
    runner, kv_cache_bytes = await asyncio.to_thread(_ready_runner, folder, parts.mesh.model, parts.config)
    return Executor(
        parts.identity,
        parts.transport,
        parts.clock,
        runner,
        nice=parts.config.nice,
        kv_cache_bytes=kv_cache_bytes,
        tracing=parts.tracing,
    )


def _ready_runner(folder: Path, model: str, config: ExecutorConfig) -> tuple[Runner, int]:
    """A runner, and the bytes of its cache.

    Importing torch takes a second or more, so it waits until the settings are known to be right.
    """
    from services.executor.factory import load

    runner = load(folder, model, config)
    runner.warm_up()
    give_back_unused()
    return runner, runner.kv_cache_bytes


if __name__ == "__main__":
    run(Service.EXECUTOR, ExecutorConfig, build)
