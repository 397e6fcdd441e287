"""The broker of the Kubernetes manifests without a cluster: its Helm values, and three servers that run with them.

Owns how values become a server's configuration and environment; expects nothing of either.
"""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from shared.cli.mesh.ports import free_port
from shared.ids import Service
from tests.conftest import NatsServer
from tests.kubernetes.manifests import KUBERNETES, ROOT

VALUES: Final = KUBERNETES / "nats/values.yaml"
SMALL: Final = KUBERNETES / "nats/values-small.yaml"
USERS: Final = (*map(str, Service), "operator")
PASSWORDS: Final = {user: f"{number}e{secrets.token_hex(8)}" for number, user in enumerate(USERS)}
"""Each looks like a number at its beginning."""


def values(*files: Path) -> dict[str, Any]:
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


def environ() -> dict[str, str]:
    """The variables of a server's container: in the chart's order, each made of those before it, as Kubernetes does."""
    told: dict[str, str] = {}
    for name, value in sorted(values(VALUES)["container"]["env"].items()):
        if isinstance(value, str):
            told[name] = re.sub(r"\$\((\w+)\)", lambda found: told.get(found[1], found[0]), value)
        else:
            told[name] = PASSWORDS[value["valueFrom"]["secretKeyRef"]["key"]]
    return told


def url(server: NatsServer, user: str) -> str:
    """The address of a server for one of its users."""
    return server.url.replace("://", f"://{user}:{PASSWORDS[user]}@")


@contextmanager
def three_servers(folder: Callable[[str], Path]) -> Iterator[list[NatsServer]]:
    """Three servers as the chart would start them, each with the others for its routes."""
    servers = [NatsServer(folder(f"nats-{number}")) for number in range(3)]
    routes = [free_port() for _ in servers]
    merged = values(VALUES)["config"]["merge"]
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
        for name, value in environ().items():
            patch.setenv(name, value)
        for server in servers:
            server.start()
    yield servers
    for server in servers:
        server.stop()
