"""The Secrets as `deploy/kubernetes/secrets.sh` makes them, with a kubectl that keeps what it is told in a folder."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from services.gateway.keys import parse_keys
from shared.ids import Service
from tests.kubernetes.manifests import KUBERNETES

_KUBECTL = """#!/bin/sh
# kubectl --namespace NAMESPACE (get secret NAME | create secret generic NAME --from-env-file=FILE)
echo "$@" >> "$CLUSTER/calls"
[ -e "$CLUSTER/away" ] && { echo "Unable to connect to the server" >&2; exit 1; }
if [ "$3" = get ]; then
    [ -e "$CLUSTER/$2.$5" ] || { echo "Error from server (NotFound): secrets \\"$5\\" not found" >&2; exit 1; }
else
    cp "${7#--from-env-file=}" "$CLUSTER/$2.$6"
fi
"""
Make = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Where the kubectl of these tests keeps Secrets, each as NAMESPACE.NAME."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl").write_text(_KUBECTL)
    (tmp_path / "bin/kubectl").chmod(0o755)
    (tmp_path / "cluster").mkdir()
    return tmp_path / "cluster"


@pytest.fixture
def make(cluster: Path) -> Make:
    """Runs secrets.sh."""

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": f"{cluster.parent / 'bin'}:{os.environ['PATH']}", "CLUSTER": str(cluster)}
        command = ["sh", str(KUBERNETES / "secrets.sh"), *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)

    return make


def _lines(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def test_each_user_of_the_broker_gets_a_password_and_clients_get_a_key(make: Make, cluster: Path) -> None:
    assert make().returncode == 0
    passwords = _lines(cluster / "shoal.broker")
    assert set(passwords) == {*map(str, Service), "operator"}
    assert len(set(passwords.values())) == len(passwords)
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in passwords.values())
    keys = _lines(cluster / "shoal.clients")
    assert set(keys) == {"api-keys"}
    assert [tenant for tenant, _ in parse_keys((keys["api-keys"],))] == ["default"]


def test_what_is_there_stays(make: Make, cluster: Path) -> None:
    make()
    before = {file.name: file.read_text() for file in cluster.glob("shoal.*")}
    assert make().returncode == 0
    assert {file.name: file.read_text() for file in cluster.glob("shoal.*")} == before


def test_no_secret_is_printed_or_on_a_command_line(make: Make, cluster: Path) -> None:
    done = make()
    said = done.stdout + done.stderr + (cluster / "calls").read_text()
    for file in cluster.glob("shoal.*"):
        for value in _lines(file).values():
            assert value.removeprefix("default:") not in said


def test_another_namespace_can_be_named(make: Make, cluster: Path) -> None:
    assert make("blue").returncode == 0
    assert (cluster / "blue.broker").exists()


def test_a_cluster_that_does_not_answer_is_not_one_without_secrets(make: Make, cluster: Path) -> None:
    (cluster / "away").touch()
    done = make()
    assert done.returncode != 0
    assert "Unable to connect" in done.stderr
    assert "create" not in (cluster / "calls").read_text()
