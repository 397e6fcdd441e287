"""`shoal status` as a process: what it prints, and its exit status."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from shared import subjects
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.state import MeshFolder, MeshState
from shared.codec import encode
from shared.ids import InstanceId, Service
from shared.messages import (
    DetokenizerStatus,
    ExecutorStatus,
    GatewayStatus,
    Presence,
    SchedulerStatus,
    Status,
    TokenizerStatus,
)
from shared.transport import Transport
from shared.transport.nats import NatsTransport
from tests.cli.beating import run_while_beating
from tests.cli.shoal import environ, shoal
from tests.conftest import NatsServer

STATUSES: dict[Service, Status] = {
    Service.GATEWAY: GatewayStatus("http://127.0.0.1:8000"),
    Service.TOKENIZER: TokenizerStatus(8192),
    Service.SCHEDULER: SchedulerStatus(),
    Service.EXECUTOR: ExecutorStatus(),
    Service.DETOKENIZER: DetokenizerStatus(),
}


@pytest.fixture
async def mesh(private_nats_server: NatsServer) -> AsyncIterator[Transport]:
    """A broker for oneself, since everybody's beats are on the same subject."""
    private_nats_server.start()
    transport = NatsTransport(private_nats_server.url, name="test")
    await transport.connect()
    yield transport
    await transport.close()


async def _status_while_beating(
    transport: Transport, services: Sequence[Service], *arguments: str, home: Path
) -> tuple[int, str, str]:
    async def beat() -> None:
        for service in services:
            beat = Presence(service, InstanceId(f"{service}-1"), f"{service}-1", ("tiny",), STATUSES[service])
            await transport.publish(subjects.presence(service), encode(beat))
        await transport.publish(subjects.presence(Service.EXECUTOR), b"no beat at all")

    done = await run_while_beating(beat, lambda: shoal("status", *arguments, env=environ(home)))
    return done.returncode, done.stdout, done.stderr


async def test_a_mesh_that_can_serve_is_status_zero(
    mesh: Transport, private_nats_server: NatsServer, tmp_path: Path
) -> None:
    url = ("--nats-url", private_nats_server.url)
    status, out, err = await _status_while_beating(mesh, list(Service), "--once", *url, home=tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("Serves tiny.\n")
    assert "executor-1" in out


async def test_a_mesh_that_cannot_is_status_one(
    mesh: Transport, private_nats_server: NatsServer, tmp_path: Path
) -> None:
    services = [service for service in Service if service is not Service.EXECUTOR]
    url = ("--nats-url", private_nats_server.url)
    status, out, _ = await _status_while_beating(mesh, services, "--once", "--json", *url, home=tmp_path)
    assert status == 1
    assert json.loads(out)["missing"] == {"tiny": ["executor"]}


async def test_the_mesh_of_this_machine_is_found_by_itself_and_by_its_port(
    mesh: Transport, private_nats_server: NatsServer, tmp_path: Path
) -> None:
    folder = MeshFolder(tmp_path, 8000)
    with folder.claim():
        folder.write(MeshState("http://127.0.0.1:8000", 8000, private_nats_server.url, "tiny", 1))
        for arguments in ((), ("--port", "8000")):
            status, out, _ = await _status_while_beating(mesh, list(Service), *arguments, home=tmp_path)
            assert status == 0
            assert out.startswith("Serves tiny.")


def test_no_broker_is_a_sentence_and_status_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    done = shoal("status", "--once", env=environ(tmp_path, SHOAL_NATS_URL=url))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"shoal: NATS cannot be reached at {url}; is a mesh running? start one with `shoal up`\n"


def test_no_mesh_on_a_port_is_a_sentence_and_status_two(tmp_path: Path) -> None:
    done = shoal("status", "--port", "8000", env=environ(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "no mesh of `shoal up` runs on port 8000" in done.stderr
