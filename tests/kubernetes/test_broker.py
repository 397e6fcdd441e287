"""The broker's values for NATS's Helm chart, and three real servers with what they say."""

import asyncio
import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import nats.errors
import nats.js.errors
import pytest
import yaml
from nats.aio.client import Client

from shared.cli.mesh.ports import free_port
from shared.ids import Service
from tests.conftest import NatsServer
from tests.kubernetes.manifests import KUBERNETES, ROOT

VALUES: Final = KUBERNETES / "nats/values.yaml"
SMALL: Final = KUBERNETES / "nats/values-small.yaml"
USERS: Final = (*map(str, Service), "operator")
PASSWORDS: Final = {user: f"{number}e{secrets.token_hex(8)}" for number, user in enumerate(USERS)}
"""Each looks like a number at its beginning."""
PATIENCE_S: Final = 20.0

_CHART: Final = {
    "config.cluster.enabled", "config.cluster.replicas", "config.jetstream.enabled", "config.monitor.enabled",
    "config.jetstream.fileStore.pvc.size", "config.jetstream.memoryStore.enabled",
    "config.jetstream.memoryStore.maxSize", "config.monitor.port", "config.merge", "container.env", "container.merge",
    "reloader.merge",
    "podTemplate.topologySpreadConstraints", "podTemplate.merge", "natsBox.enabled",
}  # fmt: skip
"""Values that the chart's documentation names. Below `merge`, `env` and the like, names are those of what is merged."""


def _values(*files: Path) -> dict[str, Any]:
    """As Helm merges the files: maps key by key, everything else as the later file has it."""
    merged: dict[str, Any] = {}
    for file in files:
        _merge(merged, yaml.safe_load(file.read_text()))
    return merged


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        path = f"{above}{key}"
        if path in _CHART or not isinstance(value, dict):
            yield path
        else:
            yield from _paths(value, f"{path}.")


@pytest.mark.parametrize("file", [VALUES, SMALL], ids=["values.yaml", "values-small.yaml"])
def test_every_value_is_one_that_the_chart_has(file: Path) -> None:
    assert set(_paths(_values(file))) <= _CHART


def test_three_servers_are_never_two_on_one_node() -> None:
    values = _values(VALUES)
    assert values["config"]["cluster"] == {"enabled": True, "replicas": 3}
    spread = values["podTemplate"]["topologySpreadConstraints"]["kubernetes.io/hostname"]
    assert spread == {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    assert _values(VALUES, SMALL)["config"]["cluster"]["enabled"] is False


def test_the_broker_is_as_confined_as_its_namespace_demands() -> None:
    values = _values(VALUES)
    pod = values["podTemplate"]["merge"]["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (values["container"], values["reloader"]):
        assert container["merge"]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_messages_may_be_as_large_as_in_compose() -> None:
    (in_compose,) = re.findall(r"max_payload: (\d+)", (ROOT / "deploy/nats/nats.conf").read_text())
    assert _values(VALUES)["config"]["merge"]["max_payload"] == int(in_compose)


def test_users_are_in_one_file_and_the_command_that_installs_says_so() -> None:
    merged = _values(VALUES)["config"]["merge"]
    assert merged["00$include"] == "users.conf"
    assert "authorization" not in merged
    option = r"--set-file 'configMap.merge.data.users\.conf=deploy/nats/users.conf'"
    assert option in VALUES.read_text()
    assert option in (ROOT / "docs/kubernetes.md").read_text()


def test_every_password_that_the_users_have_comes_from_the_secret() -> None:
    variables = _values(VALUES)["container"]["env"]
    asked_for = set(re.findall(r"\$(\w+_PASSWORD)", (ROOT / "deploy/nats/users.conf").read_text()))
    assert asked_for == {f"{user.upper()}_PASSWORD" for user in USERS}
    for user in USERS:
        assert variables[f"BROKER_{user.upper()}"] == {"valueFrom": {"secretKeyRef": {"name": "broker", "key": user}}}
    assert asked_for <= set(variables)


def _environ() -> dict[str, str]:
    """The variables of a server's container: in the chart's order, each made of those before it, as Kubernetes does."""
    told: dict[str, str] = {}
    for name, value in sorted(_values(VALUES)["container"]["env"].items()):
        if isinstance(value, str):
            told[name] = re.sub(r"\$\((\w+)\)", lambda found: told.get(found[1], found[0]), value)
        else:
            told[name] = PASSWORDS[value["valueFrom"]["secretKeyRef"]["key"]]
    return told


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    """Three servers as the chart would start them, each with the others for its routes."""
    servers = [NatsServer(tmp_path_factory.mktemp(f"nats-{number}")) for number in range(3)]
    routes = [free_port() for _ in servers]
    merged = _values(VALUES)["config"]["merge"]
    for number, server in enumerate(servers):
        server.name = f"nats-{number}"
        others = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        server.config = "".join(
            f'include "{value}"\n' if key.endswith("$include") else f"{key}: {json.dumps(value)}\n"
            for key, value in merged.items()
        )
        server.config += f'cluster {{ name: nats, listen: "127.0.0.1:{routes[number]}", routes: [{others}] }}\n'
        shutil.copy(ROOT / "deploy/nats/users.conf", server.folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environ().items():
            patch.setenv(name, value)
        for server in servers:
            server.start()
    yield servers
    for server in servers:
        server.stop()


@contextlib.asynccontextmanager
async def _as(server: NatsServer, user: str) -> Any:
    client, refusals = Client(), asyncio.Queue[str]()

    async def on_error(error: Exception) -> None:
        refusals.put_nowait(str(error))

    url = server.url.replace("://", f"://{user}:{PASSWORDS[user]}@")
    await client.connect(url, error_cb=on_error, allow_reconnect=False)
    try:
        yield client, refusals
    finally:
        await client.close()


async def test_a_gateway_at_one_server_hears_a_detokenizer_at_another(cluster: list[NatsServer]) -> None:
    async with _as(cluster[0], "gateway") as (gateway, _), _as(cluster[2], "detokenizer") as (detokenizer, _):
        heard = asyncio.Event()

        async def hear(_message: object) -> None:
            heard.set()

        await gateway.subscribe("shoal.v1.gateway.*.inbox", cb=hear)
        await gateway.flush()
        async with asyncio.timeout(PATIENCE_S):
            while not heard.is_set():  # the servers may still be telling each other who listens
                await detokenizer.publish("shoal.v1.gateway.x.inbox", b"")
                await detokenizer.flush()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(heard.wait(), 0.1)


async def test_on_every_server_a_service_may_say_no_more_than_its_work_needs(cluster: list[NatsServer]) -> None:
    for server in cluster:
        async with _as(server, "executor") as (executor, refusals):
            await executor.publish("shoal.v1.gateway.x.inbox", b"")
            async with asyncio.timeout(PATIENCE_S):
                assert "permissions violation" in (await refusals.get()).lower()


async def test_pins_can_be_kept_on_three_servers(cluster: list[NatsServer]) -> None:
    async with _as(cluster[1], "operator") as (operator, _):
        context = operator.jetstream(timeout=2)
        stream = None
        async with asyncio.timeout(PATIENCE_S):
            while stream is None:  # until the three have chosen a leader
                with contextlib.suppress(nats.errors.Error, nats.js.errors.Error):
                    stream = await context.add_stream(name="KV_test", subjects=["test.kv"], num_replicas=3)
        assert stream.cluster is not None
        assert stream.cluster.replicas is not None
        assert len(stream.cluster.replicas) == 2
