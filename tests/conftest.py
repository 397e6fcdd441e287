"""What the tests of all services share: a broker, real or in memory, and the default model."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from shared.cli.mesh import bound
from shared.cli.mesh.nats_server import find_nats_server, nats_address, nats_command
from shared.cli.mesh.ports import free_port
from shared.transport.memory import MemoryBroker

DEFAULT_MODEL = "smollm2-135m"

hypothesis.settings.register_profile(
    "shoal",
    deadline=None,  # how long an example takes says nothing on a busy machine
    derandomize="SAME_EXAMPLES" in os.environ,  # a change is judged by the same examples as the one before
)
hypothesis.settings.load_profile("shoal")


class NatsServer:
    """A real NATS server with JetStream on a port of its own that stays the same over restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = "shoal"
        self.config = ""
        self.has_jetstream = True
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return nats_address(self.port)

    def start(self) -> None:
        """Start it and return when it takes connections."""
        self.launch()
        self.wait_until_it_answers()

    def launch(self) -> None:
        """Start it. It ends with the thread that calls this."""
        (self.folder / "nats.conf").write_text(self.config)
        command = nats_command(find_nats_server(), port=self.port, store=self.folder / "jetstream")
        command[command.index("--name") + 1] = self.name
        if not self.has_jetstream:
            del command[command.index("--jetstream") :]
        command += ["--config", str(self.folder / "nats.conf")]
        with (self.folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen(bound.command(command), stdout=log, stderr=log)

    def wait_until_it_answers(self) -> None:
        """Return when it takes connections."""
        assert self._process is not None
        deadline = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "nats.log").read_text()
            assert time.monotonic() < deadline, "nats-server does not come up"
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill it, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let it keep its connections and do nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection,
        ):
            return connection.recv(4) == b"INFO"
        return False


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server for all tests; do not stop it. Use subjects of your own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """The address of the server for all tests."""
    return nats_server.url


@pytest.fixture
def private_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of this test's own, not yet started, to start, stop and freeze at will."""
    server = NatsServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def memory_broker() -> MemoryBroker:
    """A broker inside this process, with this test's transports only."""
    return MemoryBroker()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The folder of the default model in the store."""
    from shared.errors import ModelError
    from shared.models.store import ModelStore

    home = Path(os.environ.get("SHOAL_HOME", "~/.shoal")).expanduser()
    try:
        folder: Path = ModelStore(home).folder(DEFAULT_MODEL)
    except ModelError as error:
        pytest.fail(f"this test needs the default model; fetch it with: shoal pull {DEFAULT_MODEL} ({error})")
    return folder
