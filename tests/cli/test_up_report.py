"""What `shoal up` shows."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from shared.cli.mesh.log_files import LogLine, read_line
from shared.cli.mesh.report import JsonReporter, TerminalReporter
from shared.cli.mesh.state import MeshState
from shared.clock import FakeClock

STATE = MeshState("http://127.0.0.1:8000", 8000, "nats://127.0.0.1:4000", "tiny", 1)


class _Terminal:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self._file = io.StringIO()
        self.reporter = TerminalReporter(Console(file=self._file, width=80), self.clock, "/home/me/logs")

    def shown(self) -> str:
        text = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return text

    def says(self, name: str, level: int | None, text: str) -> str:
        self.reporter.line(name, LogLine(level, text), text)
        return self.shown()


@pytest.fixture
def terminal() -> _Terminal:
    return _Terminal()


def test_the_address_and_a_line_to_paste_are_shown_when_it_serves(terminal: _Terminal) -> None:
    terminal.reporter.ready(STATE, 4.21)
    shown = terminal.shown()
    assert "Shoal serves tiny at http://127.0.0.1:8000  (ready in 4.2 s)" in shown
    command = shown[shown.index("curl") :].split("\n\n")[0].replace("\\\n", "")
    body = json.loads(command[command.index("-d '") + 4 : command.rindex("'")])
    assert body == {"model": "tiny", "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    assert "  shoal chat  " in shown
    assert "/home/me/logs" in shown


def test_another_port_is_named_in_the_hints(terminal: _Terminal) -> None:
    terminal.reporter.ready(MeshState("http://127.0.0.1:8001", 8001, "", "tiny", 1), 1.0)
    shown = terminal.shown()
    assert "shoal chat --port 8001" in shown
    assert "shoal status --port 8001" in shown


def test_a_slow_start_says_that_kernels_are_compiled_once(terminal: _Terminal) -> None:
    terminal.reporter.slow(["scheduler-1", "executor-1", "executor-2"])
    assert terminal.shown() == (
        "  executor-1, executor-2 may need half a minute: a first start compiles the kernels.\n"
    )
    terminal.reporter.slow(["gateway-1"])
    assert terminal.shown() == ""


def test_serving_again_is_one_line(terminal: _Terminal) -> None:
    terminal.reporter.ready(STATE, 4.2)
    terminal.shown()
    terminal.reporter.unready(["executor", "tokenizer"])
    assert terminal.shown() == "Not serving at this moment: there is no executor and no tokenizer.\n"
    terminal.reporter.ready(STATE, 2.0)
    assert terminal.shown() == "Serving again after 2.0 s.\n"


def test_only_problems_are_shown(terminal: _Terminal) -> None:
    assert terminal.says("executor-1", logging.INFO, "started") == ""
    assert terminal.says("executor-1", None, "some library says hello") == ""
    assert terminal.says("executor-1", logging.WARNING, "hot [bold]") == "executor-1: hot [bold]\n"
    assert terminal.says("executor-1", logging.CRITICAL, "a bug") == "executor-1: a bug\n"


def test_what_all_say_at_once_is_shown_once(terminal: _Terminal) -> None:
    assert terminal.says("executor-1", logging.WARNING, "lost NATS") != ""
    assert terminal.says("gateway-1", logging.WARNING, "lost NATS") == ""
    terminal.clock.advance(3)
    assert terminal.says("gateway-1", logging.WARNING, "lost NATS") != ""


def test_a_storm_of_problems_is_cut_off(terminal: _Terminal) -> None:
    shown = "".join(terminal.says("gateway-1", logging.ERROR, f"number {number}") for number in range(1000))
    assert len(shown.splitlines()) == 21
    assert shown.splitlines()[-1] == "Many more problems; they are in /home/me/logs."
    terminal.clock.advance(11)
    assert terminal.says("gateway-1", logging.ERROR, "later") == "gateway-1: later\n"


def test_a_death_is_told_with_what_follows(terminal: _Terminal) -> None:
    terminal.reporter.died("executor-1", "was ended by SIGKILL", 0.0)
    terminal.reporter.died("executor-1", "ended with status 1", 0.5)
    assert terminal.shown().splitlines() == [
        "executor-1 was ended by SIGKILL; starting it again now.",
        "executor-1 ended with status 1; starting it again in 0.5 s.",
    ]


@pytest.fixture
def _root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_root_logger")
def test_for_machines_everything_is_an_event_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonReporter("info")
    event = '{"level": "info", "event": "started", "instance": "executor-1"}'
    reporter.starting(["nats", "executor-1"], "tiny")
    reporter.line("executor-1", read_line(event), event)
    reporter.line("executor-1", read_line("Traceback"), "Traceback")
    reporter.up("executor-1", 1.5, [])
    reporter.ready(STATE, 4.2)
    reporter.died("executor-1", "was ended by SIGKILL", 0.0)
    reporter.unready(["executor"])
    reporter.stop()
    reporter.stopped()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == [
        "starting a mesh",
        "started",
        "Traceback",
        "process is up",
        "mesh is ready",
        "process died",
        "mesh does not serve",
        "stopping the mesh",
        "mesh stopped",
    ]
    assert events[2]["program"] == "executor-1"
    assert events[4]["address"] == STATE.address
