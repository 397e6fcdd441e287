"""A mesh of real processes, two of each service, on a real broker; each can be killed, frozen or told to stop.

Stands in for a supervisor: while `supervised`, a process that has ended is started again at once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

from shared.cli.mesh import bound
from shared.cli.mesh.plan import service_command
from shared.cli.mesh.ports import free_port
from shared.ids import Service
from tests.chaos.workload import MODEL
from tests.conftest import NatsServer

NUM_EACH: Final = 2
_POLL_S: Final = 0.02
_STOP_S: Final = 20.0
DRAIN_S: Final = 0.5
"""What runs when a process is told to stop takes longer than this, so it is handed over."""

SETTINGS: Final = {
    "SHOAL_DRAIN_DEADLINE_S": str(DRAIN_S),
    "SHOAL_GATEWAY_KEEP_ALIVE_S": "0.7",
    "SHOAL_GATEWAY_RESUME_GRACE_S": "5",
    "SHOAL_SCHEDULER_ORPHAN_GRACE_S": "8",
    # Few seats, few blocks and small steps: there is a queue, prompts take many steps, and choices are preempted.
    "SHOAL_SCHEDULER_MAX_STEP_TOKENS": "64",
    "SHOAL_EXECUTOR_MAX_SLOTS": "8",
    "SHOAL_EXECUTOR_KV_CACHE_MB": "1",
    "SHOAL_EXECUTOR_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "SHOAL_LOG_FORMAT": "json",
}


def catches(process_id: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; False where there is no saying."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


class Instance:
    """One of the processes, over all its lives."""

    def __init__(self, service: Service, number: int, environ: Mapping[str, str], log: Path) -> None:
        self.service = service
        self.name = f"{service}-{number}"
        self.log = log
        self.num_starts = 0
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._expected: set[int] = set()
        """Exit statuses that this life may end with."""
        self._is_frozen = False

    @property
    def process_id(self) -> int | None:
        """Of this life, or of the last one."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Begin its next life."""
        self.num_starts += 1
        self._expected = set()
        self._is_frozen = False
        with self.log.open("ab") as log:
            command = bound.command(list(service_command(self.service)))
            self._process = subprocess.Popen(command, env=self._environ, stdout=log, stderr=log)

    def unexpected_end(self) -> str | None:
        """What it died of, if nobody did that to it."""
        if self._process is None or (status := self._process.poll()) is None or status in self._expected:
            return None
        last_lines = self.log.read_text(errors="replace").splitlines()[-3:]
        return f"{self.name} ended by itself with status {status}: {' | '.join(last_lines)[-1500:]}"

    def kill(self) -> None:
        """SIGKILL."""
        self._expected.add(-signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: it has to end by itself, with status 0. One that is still being loaded, or already gone but for
        Python, has nothing that could catch the signal, and ends of it."""
        self._expected.add(0)
        if self._process is not None and not catches(self._process.pid, signal.SIGTERM):
            self._expected.add(-signal.SIGTERM)
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._is_frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._is_frozen:
            self._is_frozen = False
            self._signal(signal.SIGCONT)

    def wait(self, timeout_s: float) -> None:
        """Return when its process has ended; kill it if it does not."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class ChaosMesh:
    """The broker and the services."""

    def __init__(self, folder: Path, home: Path, settings: Mapping[str, str] | None = None) -> None:
        """`home` is a store with the model; `folder` gets the logs and the broker's files; `settings` are in addition
        to those of every chaos mesh."""
        self.broker = NatsServer(folder)
        self._striking_broker = asyncio.Lock()
        self.nats_url = self.broker.url
        self.urls: list[str] = []
        """Of the gateways."""
        self.instances: list[Instance] = []
        self.died: list[str] = []
        """Ends that nobody brought about."""
        for service in reversed(Service):  # what is slow to start first
            for number in range(1, NUM_EACH + 1):
                environ = self._environ(service, number, home) | dict(settings or {})
                self.instances.append(Instance(service, number, environ, folder / f"{service}-{number}.log"))

    def of(self, service: Service) -> list[Instance]:
        """The instances of one service."""
        return [instance for instance in self.instances if instance.service is service]

    def named(self, name: str) -> Instance:
        """The instance of this name."""
        return next(instance for instance in self.instances if instance.name == name)

    def start(self) -> None:
        """Start everything; when it can serve, its beats say so."""
        self.broker.start()
        for instance in self.instances:
            instance.start()

    def stop(self) -> None:
        """End everything."""
        for instance in self.instances:
            instance.thaw()
            instance.kill()
        for instance in self.instances:
            instance.wait(_STOP_S)
        self.broker.stop()

    @contextlib.asynccontextmanager
    async def supervised(self) -> AsyncIterator[None]:
        """Start again whatever ends meanwhile."""
        supervising = asyncio.create_task(self._supervise(), name="supervisor")
        try:
            yield
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)

    def renew(self) -> None:
        """Kill everything but the broker, so that the next run begins with a clean mesh; call it while supervised."""
        for instance in self.instances:
            instance.thaw()
            instance.kill()

    async def restart_broker(self, away_s: float) -> None:
        """Kill the broker and start it on its old port, with what it kept."""
        async with self._striking_broker:
            await asyncio.to_thread(self.broker.stop)
            await asyncio.sleep(away_s)
            self.broker.launch()  # not on another thread: the system would end it with that
            await asyncio.to_thread(self.broker.wait_until_it_answers)

    async def freeze_broker(self, for_s: float) -> None:
        """Let the broker stand still for a while, with all its connections."""
        async with self._striking_broker:
            self.broker.freeze()
            try:
                await asyncio.sleep(for_s)
            finally:
                self.broker.thaw()

    async def _supervise(self) -> None:
        while True:
            for instance in self.instances:
                if not instance.is_running:
                    if (reason := instance.unexpected_end()) is not None:
                        self.died.append(reason)
                    instance.start()
            await asyncio.sleep(_POLL_S)

    def _environ(self, service: Service, number: int, home: Path) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        own |= SETTINGS | {
            "SHOAL_NATS_URL": self.broker.url,
            "SHOAL_HOME": str(home),
            "SHOAL_MODEL": MODEL,
            "SHOAL_INSTANCE_NAME": f"{service}-{number}",
        }
        if service is Service.GATEWAY:
            port = free_port()
            self.urls.append(f"http://127.0.0.1:{port}")
            own |= {"SHOAL_GATEWAY_HOST": "127.0.0.1", "SHOAL_GATEWAY_PORT": str(port)}
        return own
