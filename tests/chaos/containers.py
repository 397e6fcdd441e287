"""A mesh in containers, two of each service, from compose.yaml; each can be killed, frozen or told to stop.

Clients come in through the front, as everybody does; tests besides as the broker's operator, by a port that only this
mesh publishes. What is struck is started again here, as the same container, for Docker's restart policy leaves alone
what `docker kill` or `docker stop` has ended. What dies by itself Docker starts again, and counts: so it is found out.
The images must be there. Owns no broker, no clients and no verdict.
"""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from shared.cli.mesh.ports import free_port
from shared.ids import Service
from tests.chaos.mesh import NUM_EACH, SETTINGS
from tests.chaos.model_home import SOURCE
from tests.chaos.workload import MODEL
from tests.compose.docker import Container, Project, fresh_passwords, wait_until

_LOOK_S: Final = 1.0
_READY_S: Final = 420.0
"""Executors that have never run compile their kernels first, and share the cores meanwhile."""
_PAUSE_S: Final = 10.0
_BROKER: Final = "nats"
_FRONT: Final = "front"
_SIGTERM_STATUS: Final = 143
"""Of a process that has not come to the point where it handles that signal itself."""


class StruckContainer:
    """One container, over all its lives. It suffers one blow at a time, and lives again after each."""

    def __init__(self, container: Container, project: Project, died: list[str]) -> None:
        """`died` is told of ends that nobody brought about."""
        self.id = container.id
        self.name = instance_name(container)
        self._project = project
        self._died = died
        self._is_frozen = False
        self._num_restarts = 0
        """How often Docker has started it again since its last blow, as far as is known."""
        self._striking = threading.RLock()

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        """Kill it, and start it again at the end of the context."""
        with self._striking:
            self.thaw()
            self.look()
            self._project.docker("kill", self.id, may_fail=True)  # it may have died a moment ago
            try:
                yield
            finally:
                self._start()

    def kill(self) -> None:
        """SIGKILL."""
        with self.killed():
            pass

    def terminate(self) -> None:
        """SIGTERM: it has to end by itself, with status 0, or before it handles signals."""
        with self._striking:
            self.thaw()
            is_starting = self.look()["State"].get("Health", {}).get("Status") == "starting"
            self._project.docker("stop", self.id)
            status = self._inspect()["State"]["ExitCode"]
            if status != 0 and not (is_starting and status == _SIGTERM_STATUS):
                self._tell(f"told to stop, ended with status {status}")
            self._start()

    def freeze(self) -> None:
        """Let none of its processes run."""
        with self._striking:
            wait_until(self._has_paused, f"{self.name} stands still", timeout_s=_PAUSE_S)
            self._is_frozen = True

    def thaw(self) -> None:
        """Let them run on."""
        with self._striking:
            if self._is_frozen:
                self._is_frozen = False
                self._project.docker("unpause", self.id)

    def look(self) -> Mapping[str, Any]:
        """What Docker says of it. An end that nobody brought about is told."""
        with self._striking:
            found = self._inspect()
            if found["RestartCount"] > self._num_restarts:
                self._num_restarts = found["RestartCount"]
                self._tell("ended by itself")
            return found

    def _start(self) -> None:
        self._project.docker("start", self.id)
        self._num_restarts = 0  # Docker counts anew

    def _has_paused(self) -> bool:
        """Try it: with control groups of the first version, who is busy may escape a few times."""
        self._project.docker("pause", self.id, may_fail=True)
        return bool(self._inspect()["State"]["Status"] == "paused")

    def _inspect(self) -> Mapping[str, Any]:
        (found,) = self._project.inspect(self.id)
        return found

    def _tell(self, what: str) -> None:
        last_lines = self._project.last_lines(self.id, 3)
        self._died.append(f"{self.name} {what}: {' | '.join(last_lines)[-1500:]}")


class ContainerInstance(StruckContainer):
    """A container of one of the services."""

    def __init__(self, container: Container, project: Project, died: list[str]) -> None:
        super().__init__(container, project, died)
        self.service = Service(container.service)


class ContainerMesh:
    """The broker, the services and the front. See `protocol.Mesh` for what tests do with it."""

    def __init__(self, folder: Path, home: Path) -> None:
        """`home` is a store with the model, which the containers' user can read; `folder` gets the logs in the end."""
        passwords, nats_port, port = fresh_passwords(), free_port(), free_port()
        self.urls = [f"http://127.0.0.1:{port}"]
        self.nats_url = f"nats://operator:{passwords['SHOAL_COMPOSE_OPERATOR_PASSWORD']}@127.0.0.1:{nats_port}"
        self.instances: list[ContainerInstance] = []
        self.died: list[str] = []
        self._folder = folder
        self._broker: StruckContainer | None = None
        self._others: list[StruckContainer] = []
        environ = os.environ | passwords
        environ |= {"SHOAL_MODEL": MODEL, "SHOAL_COMPOSE_MODEL_SOURCE": SOURCE, "SHOAL_COMPOSE_STORE": str(home)}
        environ |= {"SHOAL_PUBLISH": f"127.0.0.1:{port}"}
        override = folder / "compose.chaos.json"
        override.write_text(json.dumps(_override(nats_port)))
        self._project = Project(f"shoal-chaos-{os.getpid()}", environ, override=override)
        for path in (home, *home.rglob("*")):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))

    def start(self) -> None:
        """Start everything, and return when it can serve. Raises TrialFailed."""
        scale = [word for service in Service for word in ("--scale", f"{service}={NUM_EACH}")]
        self._project.compose("up", "--detach", "--no-build", *scale, timeout_s=_READY_S)
        wanted = dict.fromkeys(map(str, Service), NUM_EACH) | {_FRONT: 1, _BROKER: 1}
        wait_until(lambda: self._project.healthy() == wanted, f"healthy are {wanted}", timeout_s=_READY_S)
        for container in self._project.containers():
            if container.service in tuple(Service):
                self.instances.append(ContainerInstance(container, self._project, self.died))
            elif container.service == _BROKER:
                self._broker = StruckContainer(container, self._project, self.died)
            elif container.service == _FRONT:
                self._others.append(StruckContainer(container, self._project, self.died))

    def stop(self) -> None:
        """Remove everything; what it has logged is kept."""
        for struck in self._all():
            struck.thaw()
        (self._folder / "containers.log").write_text(self._project.compose("logs", "--no-color", "--timestamps"))
        self._project.compose("down", "--volumes", "--timeout", "5", timeout_s=120.0)

    def of(self, service: Service) -> Sequence[ContainerInstance]:
        """The instances of one service."""
        return [instance for instance in self.instances if instance.service is service]

    def named(self, name: str) -> ContainerInstance:
        """The instance of this name."""
        return next(instance for instance in self.instances if instance.name == name)

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Notice meanwhile who dies by itself; that one Docker starts again."""
        looking = asyncio.create_task(self._look_for_ever(), name="looking")
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await asyncio.to_thread(self._look)

    def renew(self) -> None:
        """Kill everything but the broker and the front, so that the next run begins with a clean mesh."""
        with ThreadPoolExecutor(len(self.instances)) as threads:
            list(threads.map(ContainerInstance.kill, self.instances))

    async def restart_broker(self, away_s: float) -> None:
        """Kill the broker and start it again with what it kept."""
        assert self._broker is not None
        await asyncio.to_thread(self._restart, self._broker, away_s)

    async def freeze_broker(self, for_s: float) -> None:
        """Let the broker stand still for a while, with all its connections."""
        assert self._broker is not None
        await asyncio.to_thread(self._broker.freeze)
        try:
            await asyncio.sleep(for_s)
        finally:
            await asyncio.to_thread(self._broker.thaw)

    def _restart(self, struck: StruckContainer, away_s: float) -> None:
        with struck.killed():
            time.sleep(away_s)

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self._look)

    def _look(self) -> None:
        by_id = {struck.id: struck for struck in self._all()}
        for found in self._project.inspect(*by_id):
            if found["RestartCount"]:
                by_id[found["Id"]].look()

    def _all(self) -> list[StruckContainer]:
        broker = [self._broker] if self._broker is not None else []
        return [*broker, *self._others, *self.instances]


def instance_name(container: Container) -> str:
    """What a service in this container calls itself, as compose.yaml says: its host is named by Docker."""
    return f"{container.service}-{container.id[:12]}"


def _override(nats_port: int) -> dict[str, Any]:
    """What is otherwise than in compose.yaml: the settings of chaos, and a port of the broker for tests."""
    soon_healthy = {"interval": "2s"}  # else what has long started still counts as starting
    services: dict[str, Any] = {
        str(service): {"environment": SETTINGS, "healthcheck": soon_healthy} for service in Service
    }
    services[_BROKER] = {"ports": [f"127.0.0.1:{nats_port}:4222"], "networks": ["outside"]}
    return {"services": services}
