"""An executor as a process of its own, with a model from a store, over a real broker."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.factory import load
from shared import subjects
from shared.codec import Decoder, encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AttachExecutor,
    ExecutorAttached,
    ExecutorCapacity,
    Message,
    Presence,
    RunStep,
    SlotAssignment,
    StepCompleted,
    StepPlan,
    int32s,
)
from shared.models.store import ModelStore
from shared.sampling import SamplingParams
from shared.transport.nats import NatsTransport
from tests.executor.driver import Driver
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.mesh

WAIT_S = 60.0
"""torch alone takes seconds to import when other processes want the cores too."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one tiny model."""
    store = ModelStore(tmp_path_factory.mktemp("home"))
    staging = make_tiny_model(store.partial("tiny"))
    with store.lock("tiny"):
        store.add("tiny", staging, source="a test")
    return store.home


def start(home: Path, **settings: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"SHOAL_HOME": str(home), "SHOAL_MODEL": "tiny", "SHOAL_EXECUTOR_KV_CACHE_MB": "4"} | settings
    return subprocess.Popen(
        [sys.executable, "-m", "services.executor"],
        env=environ,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
async def transport(nats_url: str) -> AsyncIterator[NatsTransport]:
    transport = NatsTransport(nats_url, name="a test")
    await transport.connect()
    yield transport
    await transport.close()


async def inbox(transport: NatsTransport, subject: str, kind: Any) -> asyncio.Queue[Any]:
    """What arrives on a subject from now on."""
    messages: asyncio.Queue[Message] = asyncio.Queue()
    decoder: Decoder[Message] = Decoder(kind)

    async def deliver(payload: bytes, _headers: object) -> None:
        messages.put_nowait(decoder.decode(payload))

    await transport.subscribe(subject, deliver)
    return messages


async def test_a_process_serves_its_model_until_it_is_told_to_stop(
    home: Path, nats_url: str, transport: NatsTransport
) -> None:
    scheduler_id = InstanceId("scheduler-test")
    beats = await inbox(transport, subjects.presence(Service.EXECUTOR), Presence)
    answers = await inbox(transport, subjects.inbox(scheduler_id), ExecutorAttached | StepCompleted)
    process = start(home, SHOAL_NATS_URL=nats_url, SHOAL_INSTANCE_NAME="tiny-1")
    try:
        beat = await asyncio.wait_for(beats.get(), WAIT_S)
        assert (beat.name, beat.models, beat.status.device) == ("tiny-1", ("tiny",), "cpu")
        executor = subjects.inbox(beat.instance_id)
        await transport.publish(executor, encode(AttachExecutor(scheduler_id)))
        attached = await asyncio.wait_for(answers.get(), WAIT_S)
        prompt, num_tokens = [5, 6, 7], 5
        for message in plans(attached.epoch, attached.capacity, prompt, num_tokens):
            await transport.publish(executor, encode(message))
        found = [(await asyncio.wait_for(answers.get(), WAIT_S)).result.token_ids[0] for _ in range(num_tokens)]
        runner = load(ModelStore(home).folder("tiny"), "tiny", ExecutorConfig(kv_cache_mb=4))
        assert attached.capacity == runner.capacity
        assert found == Driver(runner).generate(prompt, num_tokens)
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=WAIT_S)
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.communicate()


def plans(epoch: int, capacity: ExecutorCapacity, prompt: list[int], num_tokens: int) -> list[RunStep]:
    """All steps of one greedy choice, sent ahead."""
    assigned = SlotAssignment(
        slot=0,
        request_id=RequestId("req-1"),
        choice_index=0,
        token_ids=int32s(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=0, temperature=0.0),
        block_ids=int32s([capacity.num_blocks - 1]),
    )
    assert len(prompt) + num_tokens <= capacity.block_size
    spans = [(0, len(prompt)), *((len(prompt) + number, 1) for number in range(num_tokens - 1))]
    return [
        RunStep(
            epoch,
            StepPlan(
                step_id=step_id,
                assigned=(assigned,) if step_id == 1 else (),
                slots=int32s([0]),
                starts=int32s([start]),
                counts=int32s([count]),
                num_new_blocks=int32s([0]),
                sampled_rows=int32s([0]),
            ),
        )
        for step_id, (start, count) in enumerate(spans, 1)
    ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"SHOAL_MODEL": "absent"}, "no model named absent"),
        ({"SHOAL_EXECUTOR_MAX_MODEL_LEN": "1"}, "SHOAL_EXECUTOR_MAX_MODEL_LEN=1"),
        (
            {"SHOAL_EXECUTOR_DTYPE": "float8"},
            "SHOAL_EXECUTOR_DTYPE='float8': must be one of auto, int8, int4, stored, bfloat16, float32",
        ),
    ],
    ids=["no such model", "no room", "no such format"],
)
def test_what_the_operator_must_mend_is_said_plainly(
    home: Path, nats_url: str, settings: dict[str, str], complaint: str
) -> None:
    process = start(home, SHOAL_NATS_URL=nats_url, **settings)
    _, log = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert log.splitlines()[-1].startswith("executor: ")
    assert complaint in log.splitlines()[-1]
    assert "Traceback" not in log
