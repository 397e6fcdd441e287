"""What a whole mesh logs: that requests were there and how they ended, and not a word of what was said in them."""

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from tests.integration.in_process import MODEL, InProcessMesh, in_process_mesh, load_runner
from tests.tiny_models import make_tiny_model

SECRET = "the launch code is 0000"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load_runner(folder, ExecutorConfig(max_slots=4, threads=1, kv_cache_mb=16))


@pytest.fixture
async def mesh(folder: Path, runner: ModelRunner) -> AsyncIterator[InProcessMesh]:
    async with in_process_mesh(folder, runner) as mesh:
        yield mesh


async def test_no_service_logs_prompts_or_outputs_at_any_level(
    mesh: InProcessMesh, caplog: pytest.LogCaptureFixture
) -> None:
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 20}
    completion: dict[str, Any] = {"model": MODEL, "prompt": SECRET, "max_tokens": 20, "ignore_eos": True, "echo": False}
    said = []
    with caplog.at_level(logging.DEBUG):
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/completions", completion),
            ("/v1/completions", completion | {"stop": [SECRET]}),
            ("/v1/completions", completion | {"prompt": SECRET * 500}),
            ("/v1/completions", completion | {"prompt": SECRET * 50, "timeout_ms": 1, "max_tokens": 500}),
            ("/v1/chat/completions", chat | {"chat_template_kwargs": {SECRET: SECRET}}),
            ("/v1/chat/completions", chat | {SECRET: SECRET}),
            ("/tokenize", {"model": MODEL, "prompt": SECRET}),
        ):
            async with mesh.session.post(mesh.url + path, json=body) as answer:
                document = await answer.json()
                said += [each.get("text") or each["message"]["content"] for each in document.get("choices", [])]
        await mesh.until_idle()
    assert len(said) >= 3
    logged = json.dumps([vars(record) | {"text": record.getMessage()} for record in caplog.records], default=str)
    assert len([record for record in caplog.records if record.message == "request ended"]) >= 4
    assert SECRET not in logged
    for text in said:
        assert json.dumps(text)[1:-1] not in logged, "an output"
