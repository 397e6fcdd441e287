"""What a whole mesh logs: that requests were there and how they ended, and not a word of what was said in them."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.executor.model_runner import ModelRunner
from shared import log as logs
from shared.ids import Service
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.integration.cast import Streamed, cast, create, follow, resume
from tests.integration.in_process import MODEL, InProcessMesh
from tests.integration.traces import HEADERS, LONG, TRACE_ID

SECRET = "the launch code is 0000"


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


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What this process writes as it would if it were one service."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure(name="all", level="info", style="json", stream=stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_all_services_name_a_request_and_its_clients_trace_alike(
    folder: Path, runner: ModelRunner, lines: io.StringIO
) -> None:
    """One that is resumed at another gateway: then the scheduler has something to say of it, too."""
    broker, streamed = MemoryBroker(), [Streamed()]
    async with cast(folder, [runner], lambda _name: MemoryTransport(broker)) as mesh:
        (executor,) = mesh.of(Service.EXECUTOR)
        executor.freeze()
        async with (
            mesh.session.ws_connect(f"{mesh.url(0)}/v1/stream", headers=HEADERS) as first,
            mesh.session.ws_connect(f"{mesh.url(1)}/v1/stream") as second,
        ):
            await first.send_json(create(0, LONG))
            streamed[0].request_id = (await first.receive_json(timeout=20))["request_id"]
            await second.send_json(resume(0, streamed[0]))
            await mesh.until(lambda: "request moved" in lines.getvalue())
            executor.thaw()
            await follow(second, streamed)
        await mesh.until_nothing_is_left()
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    about_it = [event for event in told if event.get("request_id") == streamed[0].request_id]
    assert {event["event"]: event["logger"].split(".")[1] for event in about_it} == {
        "request adopted": Service.SCHEDULER,
        "request moved to another gateway": Service.GATEWAY,
        "request ended": Service.GATEWAY,
    }
    assert [event["trace_id"] for event in about_it] == [TRACE_ID] * 3
