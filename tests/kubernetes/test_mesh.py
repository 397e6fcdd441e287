"""A whole mesh on the broker's three servers: each service is its own user there, and a server dies under a stream."""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from shared.cli.mesh import bound
from shared.cli.mesh.plan import service_command
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.readiness import ask_now
from shared.ids import Service
from tests.conftest import DEFAULT_MODEL, NatsServer
from tests.kubernetes.broker import three_servers, url
from tests.kubernetes.manifests import ROOT

PATIENCE_S = 90.0
PROMPT: list[dict[str, Any]] = [{"role": "user", "content": "Tell me a long story about a shoal of herrings."}]


@pytest.fixture
def mesh(
    tmp_path_factory: pytest.TempPathFactory, default_model: Path, tmp_path: Path
) -> Iterator[tuple[str, list[NatsServer]]]:
    """The address of a gateway, and the servers: each service begins at another one, and knows all of them."""
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"SHOAL_HOME": str(default_model.parents[1]), "SHOAL_MODEL": DEFAULT_MODEL}
    environ |= {"SHOAL_GATEWAY_PORT": str(port), "SHOAL_EXECUTOR_KV_CACHE_MB": "256"}
    with contextlib.ExitStack() as stack, (tmp_path / "mesh.log").open("wb") as log:
        servers = stack.enter_context(three_servers(tmp_path_factory.mktemp))
        for number, service in enumerate(Service):
            turned = servers[number % 3 :] + servers[: number % 3]
            own = environ | {"SHOAL_NATS_URL": ",".join(url(server, service) for server in turned)}
            command = bound.command(list(service_command(service)))
            process = subprocess.Popen(command, env=own, stdout=log, stderr=log, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
        deadline = time.monotonic() + PATIENCE_S
        while not ((answer := ask_now("127.0.0.1", port, DEFAULT_MODEL)) and answer.is_ready):
            assert time.monotonic() < deadline, (tmp_path / "mesh.log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", servers


@pytest.mark.model
@pytest.mark.mesh
async def test_a_stream_goes_on_when_one_of_three_servers_dies(mesh: tuple[str, list[NatsServer]]) -> None:
    address, servers = mesh
    expected = await _text(address)
    assert await _text(address, dies=servers[0]) == expected
    for server in servers:
        assert "Violation" not in (server.folder / "nats.log").read_text()


async def _text(address: str, dies: NatsServer | None = None) -> str:
    """What the model says, whatever happens after the first words."""
    text = ""
    async with asyncio.timeout(PATIENCE_S), shoal.Client(address) as client:
        stream = client.stream(model=DEFAULT_MODEL, messages=PROMPT, max_tokens=200, min_tokens=200, temperature=0)
        async for delta in stream:
            text += delta.text
            if dies is not None and len(text) > 40:
                await asyncio.to_thread(dies.stop)
                dies = None
    return text
