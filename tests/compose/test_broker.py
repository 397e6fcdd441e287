"""The broker's users: what deploy/nats/users.conf lets each service say and hear, on a real server without Docker."""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from shared.cli.mesh import bound
from shared.cli.mesh.plan import service_command
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.readiness import ask_now
from shared.ids import Service
from tests.compose.docker import ROOT
from tests.conftest import DEFAULT_MODEL, NatsServer

USERS = (*map(str, Service), "operator")
PASSWORDS = {user: f"{number}{secrets.token_hex(8)}" for number, user in enumerate(USERS)}
"""Some begin with a digit: NATS must not take these for numbers."""

SAYS = {
    "gateway": (
        *("shoal.v1.presence.gateway", "shoal.v1.tokenize.m", "shoal.v1.scheduler.x.inbox", "shoal.v1.usage"),
        *("shoal.v1.traces", "shoal.v1.traces.gateway.x"),
    ),
    "tokenizer": (
        *("shoal.v1.presence.tokenizer", "shoal.v1.gateway.x.inbox", "shoal.v1.cli.x.inbox"),
        "shoal.v1.traces.cli.x",
    ),
    "scheduler": (
        *("shoal.v1.presence.scheduler", "shoal.v1.executor.x.inbox", "shoal.v1.detokenizer.x.inbox"),
        "shoal.v1.traces.gateway.x",
    ),
    "executor": ("shoal.v1.presence.executor", "shoal.v1.scheduler.x.inbox", "shoal.v1.traces.gateway.x"),
    "detokenizer": ("shoal.v1.presence.detokenizer", "shoal.v1.gateway.x.inbox", "shoal.v1.traces.gateway.x"),
    "operator": ("shoal.v1.pins", "shoal.v1.tokenize.m"),
}
MAY_NOT_SAY = {
    "gateway": ("shoal.v1.presence.scheduler", "shoal.v1.executor.x.inbox", "shoal.v1.pins", "$JS.API.STREAM.LIST"),
    "tokenizer": ("shoal.v1.executor.x.inbox", "shoal.v1.usage", "shoal.v1.tokenize.m", "$JS.API.INFO"),
    "scheduler": ("shoal.v1.tokenize.m", "$KV.shoal_pins.p", "$JS.API.STREAM.DELETE.SHOAL_USAGE"),
    "executor": (
        *("shoal.v1.gateway.x.inbox", "shoal.v1.usage", "shoal.v1.executor.x.inbox", "$JS.API.INFO"),
        "shoal.v1.traces",
    ),
    "detokenizer": ("shoal.v1.executor.x.inbox", "shoal.v1.usage", "shoal.v1.adoptions", "shoal.v1.traces"),
}
MAY_NOT_HEAR = {
    "gateway": (">", "shoal.v1.scheduler.*.inbox", "_INBOX.>", "shoal.v1.tokenize.m", "shoal.v1.usage"),
    "tokenizer": (">", "shoal.v1.gateway.*.inbox", "shoal.v1.presence.*", "shoal.v1.tokenize.m", "_INBOX.>"),
    "scheduler": (">", "shoal.v1.gateway.*.inbox", "shoal.v1.usage", "_INBOX.>"),
    "executor": (">", "shoal.v1.gateway.*.inbox", "shoal.v1.tokenize.m", "_INBOX.>", "shoal.v1.presence.*"),
    "detokenizer": (">", "shoal.v1.executor.*.inbox", "shoal.v1.pins", "_INBOX.>", "shoal.v1.traces.gateway.*"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server with the configuration of compose.yaml; its ports and folders alone are this test's."""
    server = NatsServer(tmp_path_factory.mktemp("broker"))
    text = (ROOT / "deploy/nats/nats.conf").read_text()
    server.config = re.sub(r"(?m)^(http:|  store_dir:) .*$", "", text)
    shutil.copy(ROOT / "deploy/nats/users.conf", server.folder)
    with pytest.MonkeyPatch.context() as patch:
        for user, password in PASSWORDS.items():
            patch.setenv(f"{user.upper()}_PASSWORD", f'"{password}"')
        server.start()
    yield server
    server.stop()


def _url(server: NatsServer, user: str) -> str:
    return server.url.replace("://", f"://{user}:{PASSWORDS[user]}@")


class _Guest:
    """Somebody who tries things, and what the server refused."""

    def __init__(self) -> None:
        self.client = Client()
        self.refusals: list[str] = []

    async def settle(self) -> None:
        """Return when the server has seen all that was said, and has answered. A first ping overtakes what is said."""
        for _ in range(2):
            await self.client.flush()

    async def on_error(self, error: Exception) -> None:
        self.refusals.append(str(error))


@contextlib.asynccontextmanager
async def _as(server: NatsServer, user: str) -> AsyncIterator[_Guest]:
    guest = _Guest()
    await guest.client.connect(_url(server, user), error_cb=guest.on_error, allow_reconnect=False)
    yield guest
    await guest.client.close()


@pytest.mark.parametrize("user", USERS)
async def test_each_user_may_say_what_its_work_needs(server: NatsServer, user: str) -> None:
    async with _as(server, user) as guest:
        for subject in SAYS[user]:
            await guest.client.publish(subject, b"")
        await guest.settle()
        assert guest.refusals == []


@pytest.mark.parametrize(("user", "subject"), [(user, each) for user, all_ in MAY_NOT_SAY.items() for each in all_])
async def test_no_service_may_say_what_is_not_its_to_say(server: NatsServer, user: str, subject: str) -> None:
    async with _as(server, user) as guest:
        await guest.client.publish(subject, b"")
        await guest.settle()
        assert len(guest.refusals) == 1
        assert "permissions violation" in guest.refusals[0].lower()


@pytest.mark.parametrize(("user", "subject"), [(user, each) for user, all_ in MAY_NOT_HEAR.items() for each in all_])
async def test_no_service_may_hear_what_is_not_for_it(server: NatsServer, user: str, subject: str) -> None:
    async with _as(server, user) as guest:
        await guest.client.subscribe(subject)
        with contextlib.suppress(Exception):  # the client may close after a refusal
            await guest.settle()
        assert "permissions violation" in " ".join(guest.refusals).lower()


@pytest.mark.parametrize("credentials", ["", "gateway:wrong@", "nobody:nothing@"])
async def test_nobody_comes_in_without_a_password(server: NatsServer, credentials: str) -> None:
    greeting, answer = await _greet(server.port, credentials)
    assert json.loads(greeting.removeprefix(b"INFO "))["auth_required"] is True
    assert answer == b"-ERR 'Authorization Violation'\r\n"


async def _greet(port: int, credentials: str) -> tuple[bytes, bytes]:
    """The server's first line, and what it answers to a client that says who it is."""
    user, _, password = credentials.rstrip("@").partition(":")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    greeting = await reader.readline()
    who = {"user": user, "pass": password} if credentials else {}
    writer.write(b"CONNECT " + json.dumps({"verbose": False} | who).encode() + b"\r\nPING\r\n")
    answer = await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return greeting, answer


@pytest.fixture
def gateway_port(server: NatsServer, default_model: Path, tmp_path: Path) -> Iterator[int]:
    """The port of a whole mesh, each of whose services comes in as the user of its name."""
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ |= {"SHOAL_HOME": str(default_model.parents[1]), "SHOAL_MODEL": DEFAULT_MODEL}
    environ |= {"SHOAL_GATEWAY_PORT": str(port), "SHOAL_EXECUTOR_KV_CACHE_MB": "256"}
    with contextlib.ExitStack() as stack, (tmp_path / "mesh.log").open("wb") as log:
        for service in Service:
            own = environ | {"SHOAL_NATS_URL": _url(server, service)}
            command = bound.command(list(service_command(service)))
            process = subprocess.Popen(command, env=own, stdout=log, stderr=log, cwd=ROOT)
            stack.callback(process.wait)
            stack.callback(process.kill)
        deadline = time.monotonic() + 90
        while not ((answer := ask_now("127.0.0.1", port, DEFAULT_MODEL)) and answer.is_ready):
            assert time.monotonic() < deadline, (tmp_path / "mesh.log").read_text()
            time.sleep(0.1)
        yield port


@pytest.mark.model
@pytest.mark.mesh
def test_a_mesh_serves_pins_accounts_and_tells_with_nothing_refused(server: NatsServer, gateway_port: int) -> None:
    begun = len(_log(server))
    answer = _chat(gateway_port)
    assert answer["usage"]["completion_tokens"] > 0
    request_id = answer["id"].replace("chatcmpl-", "req-")
    for way in (("--port", str(gateway_port)), ("--nats-url", _url(server, "operator"))):
        timeline = _timeline(server, request_id, *way)
        assert {"tokenize", "queue", "prefill", "decode", "detokenize"} <= {span["name"] for span in timeline["spans"]}
    _shoal(server, "pin", "support", "--model", DEFAULT_MODEL, "--system", "Be brief and kind. " * 20)
    _wait_until_pinned(server, begun)
    records = _shoal(server, "usage", "--json")
    assert [json.loads(line)["model"] for line in records.splitlines()] == [DEFAULT_MODEL]
    assert _refused(server, begun) == []


def _log(server: NatsServer) -> str:
    return (server.folder / "nats.log").read_text()


def _refused(server: NatsServer, begun: int) -> list[str]:
    """What the server has refused since its log was `begun` characters long."""
    return [line for line in _log(server)[begun:].splitlines() if "Violation" in line]


def _chat(port: int) -> Mapping[str, Any]:
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: Mapping[str, Any] = json.load(response)
        return answer


def _timeline(server: NatsServer, request_id: str, *way: str) -> Mapping[str, Any]:
    """What is known of a request when all services have told it; one that stood still is not waited for long."""
    deadline = time.monotonic() + 60
    while True:
        timeline: Mapping[str, Any] = json.loads(_shoal(server, "trace", request_id, "--json", *way))
        if len(timeline["instances"]["answered"]) == len(Service):
            return timeline
        assert time.monotonic() < deadline, timeline["instances"]


def _wait_until_pinned(server: NatsServer, begun: int) -> None:
    """Wait until an executor holds the pin: the scheduler has read the bucket and sent it there."""
    deadline = time.monotonic() + 60
    while not re.search(r'"num_pinned_blocks": ?[1-9]', status := _shoal(server, "status", "--once", "--json")):
        assert _refused(server, begun) == []
        assert time.monotonic() < deadline, status
        time.sleep(0.2)


def _shoal(server: NatsServer, *arguments: str) -> str:
    """What a `shoal` command prints, called by an operator."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environ["SHOAL_NATS_URL"] = _url(server, "operator")
    command = [sys.executable, "-m", "shared.cli", *arguments]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
