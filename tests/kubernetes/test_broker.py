"""The broker's values for NATS's Helm chart, and three real servers with what they say."""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from tests.conftest import NatsServer
from tests.kubernetes.broker import SMALL, USERS, VALUES, three_servers, url, values
from tests.kubernetes.manifests import ROOT

PATIENCE_S: Final = 20.0

_CHART: Final = {
    "config.cluster.enabled", "config.cluster.replicas", "config.jetstream.enabled", "config.monitor.enabled",
    "config.jetstream.fileStore.pvc.size", "config.jetstream.memoryStore.enabled",
    "config.jetstream.memoryStore.maxSize", "config.monitor.port", "config.merge", "container.env", "container.merge",
    "reloader.merge",
    "podTemplate.topologySpreadConstraints", "podTemplate.merge", "natsBox.enabled",
}  # fmt: skip
"""Values that the chart's documentation names. Below `merge`, `env` and the like, names are those of what is merged."""


def _paths(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in tree.items():
        path = f"{above}{key}"
        if path in _CHART or not isinstance(value, dict):
            yield path
        else:
            yield from _paths(value, f"{path}.")


@pytest.mark.parametrize("file", [VALUES, SMALL], ids=["values.yaml", "values-small.yaml"])
def test_every_value_is_one_that_the_chart_has(file: Path) -> None:
    assert set(_paths(values(file))) <= _CHART


def test_three_servers_are_never_two_on_one_node() -> None:
    chosen = values(VALUES)
    assert chosen["config"]["cluster"] == {"enabled": True, "replicas": 3}
    spread = chosen["podTemplate"]["topologySpreadConstraints"]["kubernetes.io/hostname"]
    assert spread == {"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    assert values(VALUES, SMALL)["config"]["cluster"]["enabled"] is False


def test_the_broker_is_as_confined_as_its_namespace_demands() -> None:
    chosen = values(VALUES)
    pod = chosen["podTemplate"]["merge"]["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (chosen["container"], chosen["reloader"]):
        assert container["merge"]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_messages_may_be_as_large_as_in_compose() -> None:
    (in_compose,) = re.findall(r"max_payload: (\d+)", (ROOT / "deploy/nats/nats.conf").read_text())
    assert values(VALUES)["config"]["merge"]["max_payload"] == int(in_compose)


def test_users_are_in_one_file_and_the_command_that_installs_says_so() -> None:
    merged = values(VALUES)["config"]["merge"]
    assert merged["00$include"] == "users.conf"
    assert "authorization" not in merged
    option = r"--set-file 'configMap.merge.data.users\.conf=deploy/nats/users.conf'"
    assert option in VALUES.read_text()
    assert option in (ROOT / "docs/kubernetes.md").read_text()


def test_every_password_that_the_users_have_comes_from_the_secret() -> None:
    variables = values(VALUES)["container"]["env"]
    asked_for = set(re.findall(r"\$(\w+_PASSWORD)", (ROOT / "deploy/nats/users.conf").read_text()))
    assert asked_for == {f"{user.upper()}_PASSWORD" for user in USERS}
    for user in USERS:
        assert variables[f"BROKER_{user.upper()}"] == {"valueFrom": {"secretKeyRef": {"name": "broker", "key": user}}}
    assert asked_for <= set(variables)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    """Three servers as the chart would start them."""
    with three_servers(tmp_path_factory.mktemp) as servers:
        yield servers


@contextlib.asynccontextmanager
async def _as(server: NatsServer, user: str) -> Any:
    client, refusals = Client(), asyncio.Queue[str]()

    async def on_error(error: Exception) -> None:
        refusals.put_nowait(str(error))

    await client.connect(url(server, user), error_cb=on_error, allow_reconnect=False)
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
