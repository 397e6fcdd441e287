"""A mesh from start to stop, with a real broker, one small service and something that answers `/readyz`."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from shared import subjects
from shared.cli.mesh.log_files import LogLine
from shared.cli.mesh.nats_server import find_nats_server, nats_address, nats_command
from shared.cli.mesh.plan import MeshOptions, Program, StopOrder
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.readiness import Readiness, address, ask
from shared.cli.mesh.run import MeshRun
from shared.cli.mesh.state import MeshFolder, MeshState
from shared.cli.mesh.watch import connected, listen
from shared.clock import SystemClock
from shared.codec import encode
from shared.errors import OperatorError
from shared.ids import Service, is_instance_id, new_instance_id
from shared.messages import DetokenizerStatus, Presence
from tests.shared.transport.receiver import PATIENCE_S

_READYZ = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ready = os.path.exists(sys.argv[2])
        self.send_response(200 if is_ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"missing": {} if is_ready else {"tiny": ["executor"]}}).encode())
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class _Reports:
    """What was told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = asyncio.Event()

    def _add(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()

    def starting(self, names: Sequence[str], model: str) -> None:
        self._add(f"starting {' '.join(names)} for {model}")

    def up(self, name: str, after_s: float, waiting_for: Sequence[str]) -> None:
        self._add(f"up {name}")

    def slow(self, waiting_for: Sequence[str]) -> None:
        self._add(f"slow for want of {' '.join(waiting_for)}")

    def unreachable(self, nats_url: str, after_s: float) -> None:
        self._add(f"unreachable {nats_url}")

    def ready(self, state: MeshState, after_s: float) -> None:
        self._add(f"ready {state.address}")

    def unready(self, missing: Sequence[str]) -> None:
        self._add(f"unready without {' '.join(missing)}")

    def line(self, name: str, line: LogLine, raw: str) -> None:
        pass

    def died(self, name: str, how: str, delay_s: float) -> None:
        self._add(f"died {name}")

    def hung(self, name: str) -> None:
        self._add(f"hung {name}")

    def stop(self) -> None:
        self._add("stop")

    def stopping(self, names: Sequence[str]) -> None:
        self._add(f"stopping {' '.join(names)}")

    def killed(self, name: str, *, was_asked: bool) -> None:
        self._add(f"killed {name}" + (" as asked" if was_asked else ""))

    def stopped(self) -> None:
        self._add("stopped")

    async def told(self, event: str, times: int = 1) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.events.count(event) < times:
                self._changed.clear()
                await self._changed.wait()


class _Mesh:
    def __init__(self, folder: Path) -> None:
        port, nats_port = free_port(), free_port()
        self.is_ready = folder / "ready"
        self.is_ready.touch()
        nats_url = nats_address(nats_port)
        self.options = MeshOptions("127.0.0.1", port, "tiny", folder, nats_url, drain_deadline_s=5.0)
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        service = own | {"SHOAL_NATS_URL": nats_url, "SHOAL_INSTANCE_NAME": "detokenizer-1"}
        nats = nats_command(find_nats_server(), port=nats_port, store=folder / "jetstream")
        readyz = (sys.executable, "-c", _READYZ, str(port), str(self.is_ready))
        self.programs = [
            Program("nats", tuple(nats), own, StopOrder.BROKER),
            Program("gateway-1", readyz, own, StopOrder.GATEWAY),
            Program("detokenizer-1", (sys.executable, "-m", "tests.shared.echo_service"), service),
        ]
        self.folder = MeshFolder(folder, port)
        self.folder.folder.mkdir(parents=True)
        self.reports = _Reports()
        self.run = MeshRun(self.options, self.programs, self.folder, reporter=self.reports, clock=SystemClock())
        self.running = asyncio.create_task(self.run.run())

    def signal(self, name: str, number: signal.Signals) -> None:
        """Do something to one of the processes."""
        pid = self.run.supervisor.pid(name)
        assert pid is not None
        os.kill(pid, number)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told of processes that are slow because the machine is busy."""
    monkeypatch.setattr("shared.cli.mesh.run._SLOW_AFTER_S", 3600.0)
    monkeypatch.setattr("shared.cli.mesh.readiness._TIMEOUT_S", PATIENCE_S)


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[_Mesh]:
    mesh = _Mesh(tmp_path)
    await mesh.reports.told("up detokenizer-1")
    yield mesh
    while not mesh.running.done():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait({mesh.running}, timeout=1)
    mesh.running.exception()


async def test_it_tells_who_is_up_and_when_it_serves_and_stops_in_order(mesh: _Mesh) -> None:
    ready = f"ready http://127.0.0.1:{mesh.options.port}"
    await mesh.reports.told(ready)
    assert mesh.folder.read() == MeshState(
        address("127.0.0.1", mesh.options.port), mesh.options.port, mesh.options.nats_url, "tiny", os.getpid()
    )
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(mesh.running, PATIENCE_S)
    assert sorted(mesh.reports.events[1:3]) == [ready, "up detokenizer-1"]
    assert [event for event in mesh.reports.events if event not in (ready, "up detokenizer-1")] == [
        "starting nats gateway-1 detokenizer-1 for tiny",
        "stop",
        "stopping gateway-1",
        "stopping detokenizer-1",
        "stopping nats",
    ]


@pytest.mark.parametrize("name", ["nats", "detokenizer-1", "gateway-1"])
async def test_whatever_dies_comes_back(mesh: _Mesh, name: str) -> None:
    ready = f"ready http://127.0.0.1:{mesh.options.port}"
    await mesh.reports.told(ready)
    mesh.signal(name, signal.SIGKILL)
    await mesh.reports.told(f"died {name}")
    if name == "detokenizer-1":
        await mesh.reports.told("up detokenizer-1", times=2)
    while mesh.run.supervisor.pid(name) is None:
        await asyncio.wait_for(asyncio.sleep(0.01), PATIENCE_S)


async def test_others_hear_at_once_of_a_process_that_died_without_a_word(mesh: _Mesh) -> None:
    beats: list[Presence] = []
    has_died, has_lived_thrice = asyncio.Event(), asyncio.Event()

    def on_beat(beat: Presence) -> None:
        beats.append(beat)
        if beat.has_died:
            has_died.set()
        if len({beat.instance_id for beat in beats}) == 3:
            has_lived_thrice.set()

    async with connected(mesh.options.nats_url) as transport:
        await listen(transport, on_beat)
        mesh.signal("detokenizer-1", signal.SIGKILL)
        await asyncio.wait_for(has_died.wait(), PATIENCE_S)
        (last,) = [beat for beat in beats if beat.has_died]
        assert last.is_leaving
        assert is_instance_id(last.instance_id, Service.DETOKENIZER)
        await mesh.reports.told("up detokenizer-1", times=2)
        mesh.signal("detokenizer-1", signal.SIGTERM)
        await mesh.reports.told("died detokenizer-1", times=2)
        await mesh.reports.told("up detokenizer-1", times=3)
        await asyncio.wait_for(has_lived_thrice.wait(), PATIENCE_S)  # each life has an id of its own
        assert sum(beat.has_died for beat in beats) == 1, "who leaves in order says so itself"


async def test_a_namesake_on_another_machine_is_somebody_else(mesh: _Mesh) -> None:
    beats: list[Presence] = []
    namesake = Presence(
        Service.DETOKENIZER, new_instance_id(Service.DETOKENIZER), "detokenizer-1", (), DetokenizerStatus()
    )
    async with connected(mesh.options.nats_url) as transport:
        await listen(transport, beats.append)
        await transport.publish(subjects.presence(Service.DETOKENIZER), encode(namesake))
        await transport.publish(subjects.presence(Service.DETOKENIZER), encode(namesake))
        mesh.signal("detokenizer-1", signal.SIGKILL)
        await mesh.reports.told("up detokenizer-1", times=2)
        (last,) = [beat for beat in beats if beat.has_died]
        assert last.instance_id != namesake.instance_id


async def test_it_tells_when_it_does_not_serve_and_when_it_does_again(mesh: _Mesh) -> None:
    ready = f"ready http://127.0.0.1:{mesh.options.port}"
    await mesh.reports.told(ready)
    mesh.is_ready.unlink()
    await mesh.reports.told("unready without executor")
    assert mesh.reports.events.count(ready) == 1
    mesh.is_ready.touch()
    await mesh.reports.told(ready, times=2)


async def test_a_process_that_is_stuck_is_ended_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.cli.mesh.liveness.HUNG_AFTER_S", 1.5)
    mesh = _Mesh(tmp_path)
    try:
        await mesh.reports.told("up detokenizer-1")
        mesh.signal("detokenizer-1", signal.SIGSTOP)
        await mesh.reports.told("hung detokenizer-1")
        await mesh.reports.told("died detokenizer-1")
        await mesh.reports.told("up detokenizer-1", times=2)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(mesh.running, PATIENCE_S)


async def test_a_second_signal_does_not_wait(mesh: _Mesh) -> None:
    mesh.signal("detokenizer-1", signal.SIGSTOP)  # it will not leave by itself
    os.kill(os.getpid(), signal.SIGINT)
    await mesh.reports.told("stopping detokenizer-1")
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(mesh.running, PATIENCE_S)
    assert "killed detokenizer-1 as asked" in mesh.reports.events


async def test_a_bug_in_the_watching_stops_the_mesh_and_is_not_hidden(
    mesh: _Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("shared.cli.mesh.readiness.ask", fail)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(mesh.running, PATIENCE_S)
    assert mesh.reports.events[-1] == "stopping nats"


async def test_what_is_missing_is_asked_for_the_model(mesh: _Mesh) -> None:
    await mesh.reports.told(f"ready http://127.0.0.1:{mesh.options.port}")
    assert await ask("127.0.0.1", mesh.options.port, "tiny") == Readiness(is_ready=True)
    mesh.is_ready.unlink()
    assert await ask("127.0.0.1", mesh.options.port, "tiny") == Readiness(is_ready=False, missing=("executor",))


async def test_nobody_at_the_address_is_no_answer() -> None:
    assert await ask("127.0.0.1", free_port(), "tiny") is None


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("example", "http://example:80"),
    ],
)
def test_the_address_is_one_that_this_machine_can_use(host: str, url: str) -> None:
    assert address(host, 80) == url


def test_without_a_nats_server_one_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OperatorError, match="there is no nats-server here: install one with"):
        find_nats_server()
    program = tmp_path / "nats-server"
    program.touch(mode=0o755)
    assert find_nats_server() == program
