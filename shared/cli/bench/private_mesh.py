"""A mesh of the benchmark's own: `shoal up` on a free port, and what its processes have cost so far."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from shared.cli.mesh import bound, readiness
from shared.cli.mesh.find import home_folder
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.state import MeshFolder
from shared.errors import OperatorError

_START_TIMEOUT_S = 180
_STOP_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class PrivateMesh:
    """Where it is, and the process that runs it."""

    url: str
    pid: int
    ready_s: float
    """From the command to the first time that it could serve."""

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of each kind of process since its start; the broker is `nats`."""
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes()}

    def resident_bytes(self) -> dict[str, int]:
        """Memory of each kind of process now."""
        return {name: process.memory_info().rss for name, process in self._processes()}

    def _processes(self) -> Iterator[tuple[str, psutil.Process]]:
        for process in psutil.Process(self.pid).children(recursive=True):
            command = process.cmdline()
            service = next((part.removeprefix("services.") for part in command if part.startswith("services.")), None)
            if service is not None:
                yield service, process
            elif any("nats-server" in part for part in command):
                yield "nats", process


@contextmanager
def private_mesh(model: str, environ: Mapping[str, str] = os.environ) -> Iterator[PrivateMesh]:
    """A running mesh that stops at the end. Raises OperatorError, with what it said, if it does not come up."""
    port = free_port()
    command = [sys.executable, "-m", "shared.cli", "up", "--port", str(port), "--model", model]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(bound.command(command), stdout=output, stderr=subprocess.STDOUT, env=dict(environ))
        try:
            while (answer := readiness.ask_now("127.0.0.1", port, model)) is None or not answer.is_ready:
                if process.poll() is not None or time.perf_counter() - began > _START_TIMEOUT_S:
                    output.seek(0)
                    raise OperatorError(f"the mesh did not come up: {output.read().strip()}")
                time.sleep(0.05)
            yield PrivateMesh(readiness.address("127.0.0.1", port), process.pid, time.perf_counter() - began)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode == 0:
                MeshFolder(home_folder(None, environ), port).remove()  # nobody will look for its logs
