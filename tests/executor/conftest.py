"""Runners over tiny models, built once for each configuration that tests ask for; and the stage of service tests."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.factory import load
from services.executor.kernels.jit import use_threads
from services.executor.model_runner import ModelRunner
from tests.executor.driver import Driver
from tests.executor.stage import Stage
from tests.tiny_models import make_tiny_model

SMALL = ExecutorConfig(
    dtype="float32", kv_cache_mb=4, block_size=4, max_slots=8, max_step_tokens=64, max_model_len=256, threads=1
)
"""Room for some hundred blocks of a tiny model, in blocks small enough that short prompts fill several."""
INTEGER = replace(SMALL, block_size=16, dtype="int8", kv_cache_mb=2)
"""The same in integers, which need larger blocks."""

TinyFolder = Callable[..., Path]
MakeDriver = Callable[..., Driver]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """A test's setting of threads ends with it; on a busy machine, threads of tiny models mostly wait."""
    use_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> TinyFolder:
    """Makes the folder of a tiny model, or returns the one made before from the same arguments."""
    folders: dict[str, Path] = {}

    def make(family: str = "llama", **config: Any) -> Path:
        key = f"{family} {sorted(config.items())}"
        if key not in folders:
            folders[key] = make_tiny_model(tmp_path_factory.mktemp("model"), family, **config)
        return folders[key]

    return make


@pytest.fixture(scope="session")
def _runners() -> dict[tuple[Path, ExecutorConfig], ModelRunner]:
    return {}


@pytest.fixture
def make_driver(tiny_folder: TinyFolder, _runners: dict[tuple[Path, ExecutorConfig], ModelRunner]) -> MakeDriver:
    """Makes a driver of a runner with empty slots. Its cache holds what earlier tests left there, as in real life."""

    def make(family: str = "llama", *, settings: ExecutorConfig = SMALL, **config: Any) -> Driver:
        key = (tiny_folder(family, **config), settings)
        if key not in _runners:
            _runners[key] = load(key[0], "tiny", settings)
        _runners[key].reset()
        return Driver(_runners[key])

    return make


@pytest.fixture
def driver(make_driver: MakeDriver) -> Driver:
    """A driver of the tiny Llama."""
    return make_driver()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage()
    await stage.start()
    yield stage
    await stage.stop()
