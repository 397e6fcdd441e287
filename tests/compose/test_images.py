"""What the Dockerfile installs: from pyproject.toml's lists, for each image no more than its service needs."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shared.ids import Service
from tests.compose.docker import ROOT

_INSTALLS = dict(
    re.findall(r"FROM tools AS (\w+)-packages\nRUN .* sh install\.sh ([a-z ]+)", (ROOT / "Dockerfile").read_text())
)
"""The extras that each image has, by image."""


def _requirements(*extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/docker/requirements.py", *extras]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_service_has_an_image_with_the_packages_of_its_own_extra_and_of_telemetry() -> None:
    targets = set(re.findall(r"FROM service AS (\w+)", (ROOT / "Dockerfile").read_text()))
    assert targets == set(map(str, Service))
    assert {service: _INSTALLS[service].split() for service in Service} == {
        service: [service, "telemetry"] for service in Service
    }


def test_only_the_executors_image_has_torch() -> None:
    with_torch = {image for image, extras in _INSTALLS.items() if "torch" in _requirements(*extras.split()).stdout}
    assert with_torch == {"executor"}


@pytest.mark.parametrize("command", ["pull", "models", "status", "pin", "usage", "chat"])
def test_the_image_of_the_command_has_all_code_that_it_imports(command: str) -> None:
    program = f"import sys, shared.cli.{command}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    needed = {"shared", "services", "shoal"} & set(done.stdout.split())
    dockerfile = (ROOT / "Dockerfile").read_text()
    image = re.search(r"^FROM base AS operator\n(.*?)\n\n", dockerfile, re.MULTILINE | re.DOTALL)
    assert image is not None
    assert needed <= set(re.findall(r"^COPY --from=code /app/(\w+) /app/\1$", image[1], re.MULTILINE))
    assert needed <= set(re.findall(r"^COPY (\w+) /app/\1$", dockerfile, re.MULTILINE))
    assert needed <= set(re.findall(r"^!(\w+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))


def test_the_packages_of_no_extra_are_what_every_service_needs() -> None:
    names = [re.match(r"[\w-]+", line) for line in _requirements("scheduler").stdout.splitlines()]
    assert [name and name[0] for name in names] == ["msgspec", "nats-py"]


def test_an_image_knows_the_version_of_its_code(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "deploy/docker/metadata.py", str(tmp_path)], cwd=ROOT, check=True)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (found.name, found.version) == (project["name"], project["version"])
    assert "metadata.py" in (ROOT / "deploy/docker/install.sh").read_text()


def test_an_extra_that_does_not_exist_fails_the_build() -> None:
    assert _requirements("gatewya").returncode != 0
