"""The gateway as a process of its own, on a real broker: it starts, says where it is, drains and stays small."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from shared import subjects
from shared.cli.mesh.ports import free_port
from shared.codec import encode
from shared.ids import InstanceId, Service
from shared.messages import (
    DetokenizerStatus,
    ExecutorStatus,
    Presence,
    SchedulerStatus,
    Status,
    TokenizerStatus,
)
from shared.transport.nats import NatsTransport
from tests.gateway.fake_mesh import PATIENCE_S

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
MAX_MEMORY_BYTES = 150 << 20
"""What one gateway may take of a small machine."""

STATUSES: dict[Service, Status] = {
    Service.TOKENIZER: TokenizerStatus(max_model_len=128),
    Service.SCHEDULER: SchedulerStatus(),
    Service.EXECUTOR: ExecutorStatus(),
    Service.DETOKENIZER: DetokenizerStatus(),
}


def start(port: int, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "services.gateway"],
        cwd=ROOT,
        env={**os.environ, "SHOAL_GATEWAY_PORT": str(port), **environment},
        stderr=subprocess.PIPE,
    )


async def status_of(url: str) -> int:
    """The status that the path gives, 0 while nobody listens."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status
    except aiohttp.ClientConnectionError:
        return 0


async def until_status(url: str, status: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await status_of(url) != status:  # noqa: ASYNC110  # another process sets no event of ours
            await asyncio.sleep(0.05)


async def beat(transport: NatsTransport) -> None:
    for service, status in STATUSES.items():
        beat = Presence(service, InstanceId(f"{service}-1"), "fake", ("m",), status)
        await transport.publish(subjects.presence(service), encode(beat))


async def beat_for_ever(transport: NatsTransport) -> None:
    while True:
        await beat(transport)
        await asyncio.sleep(0.1)


async def test_process_lives_before_it_is_ready_and_drains_when_told(nats_url: str) -> None:
    port = free_port()
    process = start(port, SHOAL_NATS_URL=nats_url)
    transport = NatsTransport(nats_url, name="test")
    try:
        await transport.connect()
        url = f"http://127.0.0.1:{port}"
        await until_status(f"{url}/healthz", 200)
        assert await status_of(f"{url}/readyz") == 503
        beating = asyncio.create_task(beat_for_ever(transport))
        await until_status(f"{url}/readyz", 200)
        beating.cancel()
        assert psutil.Process(process.pid).memory_info().rss < MAX_MEMORY_BYTES
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
        await transport.close()


async def test_taken_port_is_the_operators_to_mend(nats_url: str) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda _, __: None, "127.0.0.1", port)
    async with server:
        process = start(port, SHOAL_NATS_URL=nats_url)
        _, errors = await asyncio.to_thread(process.communicate, None, PATIENCE_S)
    assert process.returncode == 2
    assert b"SHOAL_GATEWAY_PORT" in errors


def test_settings_are_explained() -> None:
    command = [sys.executable, "-m", "services.gateway", "--settings"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert "SHOAL_GATEWAY_API_KEYS" in shown
    assert "SHOAL_GATEWAY_MAX_OPEN_REQUESTS" in shown


def test_process_imports_no_model_libraries() -> None:
    check = (
        "import sys, services.gateway.__main__; print({'torch', 'tokenizers', 'numpy', 'jinja2'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout == "set()\n"
