"""Docker Compose as the trial of compose.yaml uses it. Owns the commands; knows nothing of what they are to show."""

import json
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class TrialFailed(AssertionError):
    """Compose did not do what it should."""


def why_not() -> str | None:
    """Why Compose cannot be tried on this machine, or None if it can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command, what in (
        (["info"], "no Docker engine answers"),
        (["compose", "version"], "there is no Docker Compose"),
    ):
        done = subprocess.run(["docker", *command], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode != 0:
            return f"{what}: {(done.stderr.strip().splitlines() or ['it says nothing'])[-1]}"
    return None


def fresh_passwords() -> dict[str, str]:
    """Those of the broker's users, as an operator would have them in `.env`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "passwords")
        subprocess.run(["sh", ROOT / "deploy/passwords.sh", file], check=True)
        return dict(line.split("=", 1) for line in file.read_text().splitlines())


def wait_until(is_so: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> float:
    """Ask four times a second; the seconds it took. Raises TrialFailed."""
    begun = time.monotonic()
    while not is_so():
        if time.monotonic() - begun > timeout_s:
            raise TrialFailed(f"after {timeout_s:g} s still not so: {what}")
        time.sleep(0.25)
    return time.monotonic() - begun


@dataclass(frozen=True, slots=True)
class Container:
    """One container of the project."""

    id: str
    name: str
    service: str
    is_running: bool
    is_healthy: bool


class Project:
    """One Compose project, from the compose.yaml of this checkout, and what `override` adds to it or says otherwise."""

    def __init__(self, name: str, environ: Mapping[str, str], *, override: Path | None = None) -> None:
        files = [ROOT / "compose.yaml", *([override] if override else [])]
        self._compose = ["docker", "compose", "--project-name", name, "--project-directory", str(ROOT)]
        self._compose += [word for file in files for word in ("--file", str(file))]
        self._environ = dict(environ)

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """The standard output of `docker compose ARGUMENTS`. Raises TrialFailed with what it said if it fails."""
        return self._run([*self._compose, *arguments], timeout_s)

    def docker(self, *arguments: str, may_fail: bool = False) -> str:
        """The standard output of `docker ARGUMENTS`. Raises TrialFailed with what it said if it fails and may not."""
        return self._run(["docker", *arguments], 60.0, may_fail=may_fail)

    def inspect(self, *container_ids: str) -> list[dict[str, Any]]:
        """All that Docker knows of these containers."""
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *container_ids))
        return found

    def last_lines(self, container_id: str, count: int) -> list[str]:
        """What a container has written last, of either stream."""
        logs = ["docker", "logs", "--tail", str(count), container_id]
        done = subprocess.run(
            logs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environ, check=False
        )
        return done.stdout.splitlines()

    def containers(self, service: str | None = None) -> list[Container]:
        """All of them, also those that have ended."""
        rows = ["ps", "--all", "--no-trunc", "--format", "json", *([service] if service else [])]
        lines = self.compose(*rows).splitlines()
        return [_container(json.loads(line)) for line in lines if line]

    def healthy(self) -> Counter[str]:
        """How many containers of each service are healthy."""
        return Counter(container.service for container in self.containers() if container.is_healthy)

    def logs(self, service: str) -> str:
        """What all containers of a service have written."""
        return self.compose("logs", "--no-log-prefix", service)

    def crash(self, container: Container) -> None:
        """Kill what the container runs, as the kernel would when memory is short: Docker is not told."""
        self._run(["docker", "exec", container.name, "sh", "-c", "kill -9 -1"], 30.0, may_fail=True)

    def num_restarts(self, container: Container) -> int:
        """How often Docker has started it again."""
        return int(self.docker("inspect", "--format", "{{.RestartCount}}", container.name))

    def _run(self, command: Sequence[str], timeout_s: float, *, may_fail: bool = False) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=self._environ, check=False, cwd=ROOT
        )
        if done.returncode != 0 and not may_fail:
            raise TrialFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout


def _container(row: Mapping[str, Any]) -> Container:
    return Container(row["ID"], row["Name"], row["Service"], row["State"] == "running", row["Health"] == "healthy")
