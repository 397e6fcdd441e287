"""Processes kept alive and stopped in order, with small programs in the place of services."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import psutil
import pytest

from shared.cli.mesh.log_files import LogLine
from shared.cli.mesh.plan import Program, StopOrder
from shared.cli.mesh.restarts import RestartRules
from shared.cli.mesh.supervisor import GaveUp, Supervisor, describe_status
from shared.clock import SystemClock
from shared.errors import OperatorError
from tests.shared.transport.receiver import PATIENCE_S

HASTY = RestartRules(max_restarts=2, second_delay_s=0.01)

WORK = """
import signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready", flush=True)
while not told: time.sleep(0.01)
print("bye", flush=True)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True: time.sleep(0.02)
"""


def program(name: str, code: str, stop_order: StopOrder = StopOrder.WORKERS, **environ: str) -> Program:
    """A program in Python."""
    command = (sys.executable, "-I", "-S", "-c", textwrap.dedent(code))
    return Program(name, command, dict(os.environ) | environ, stop_order)


class _Reports:
    """What the supervisor told, and something to wait for it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def _add(self, *event: str) -> None:
        self.events.append((event[0], event[1]))
        self.changed.set()

    def line(self, name: str, line: LogLine, raw: str) -> None:
        self._add(name, line.text)

    def died(self, name: str, how: str, delay_s: float) -> None:
        self._add("died", f"{name} {how}")

    def stopping(self, names: Sequence[str]) -> None:
        self._add("stopping", " ".join(names))

    def killed(self, name: str, *, was_asked: bool) -> None:
        self._add("killed, as asked" if was_asked else "killed", name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def said(self, name: str, text: str, times: int = 1) -> None:
        await self.until(lambda: self.events.count((name, text)) >= times)


class _Mesh:
    def __init__(self, programs: Sequence[Program], folder: Path, drain_deadline_s: float) -> None:
        self.reports, self.stop = _Reports(), asyncio.Event()
        self.supervisor = Supervisor(
            programs,
            folder=folder,
            reporter=self.reports,
            clock=SystemClock(),
            rules=HASTY,
            drain_deadline_s=drain_deadline_s,
        )
        self.running = asyncio.create_task(self.supervisor.run(self.stop))

    async def end(self) -> None:
        """Stop it. Raises what it raises."""
        self.stop.set()
        await asyncio.wait_for(self.running, PATIENCE_S)

    async def failure(self) -> str:
        """How it ended by itself."""
        try:
            await asyncio.wait_for(self.running, PATIENCE_S)
        except (GaveUp, OperatorError) as error:
            self.running = asyncio.create_task(asyncio.sleep(0))
            return f"{type(error).__name__}: {error}"
        raise AssertionError("it did not fail")

    def pid(self, name: str) -> int:
        pid = self.supervisor.pid(name)
        assert pid is not None
        return pid


@contextlib.asynccontextmanager
async def _mesh(folder: Path, *programs: Program, drain_deadline_s: float = 20.0) -> AsyncIterator[_Mesh]:
    before = psutil.Process().children()
    mesh = _Mesh(programs, folder, drain_deadline_s)
    try:
        yield mesh
        await mesh.end()
    finally:
        mesh.supervisor.hurry()
        mesh.stop.set()
        await asyncio.gather(mesh.running, return_exceptions=True)
        assert psutil.Process().children() == before, "a process, or a zombie, was left behind"


async def test_processes_run_until_told_to_stop(tmp_path: Path) -> None:
    async with _mesh(tmp_path, program("a", WORK), program("b", WORK)) as mesh:
        await mesh.reports.said("a", "ready")
        await mesh.reports.said("b", "ready")
        await mesh.end()
        assert ("a", "bye") in mesh.reports.events
        assert ("b", "bye") in mesh.reports.events
        assert mesh.supervisor.pid("a") is None


async def test_the_client_side_stops_before_what_it_needs(tmp_path: Path) -> None:
    programs = [
        program("nats", WORK, StopOrder.BROKER),
        program("executor", WORK, StopOrder.WORKERS),
        program("scheduler", WORK, StopOrder.MIDDLE),
        program("gateway", WORK, StopOrder.GATEWAY),
    ]
    async with _mesh(tmp_path, *programs) as mesh:
        for each in programs:
            await mesh.reports.said(each.name, "ready")
        await mesh.end()
        order = [event for event in mesh.reports.events if event[0] == "stopping" or event[1] == "bye"]
        assert order == [
            event
            for name in ("gateway", "scheduler", "executor", "nats")
            for event in (("stopping", name), (name, "bye"))
        ]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
async def test_a_process_that_dies_is_started_again(tmp_path: Path, number: signal.Signals) -> None:
    async with _mesh(tmp_path, program("a", WORK)) as mesh:
        await mesh.reports.said("a", "ready")
        first = mesh.pid("a")
        os.kill(first, number)
        await mesh.reports.said("a", "ready", times=2)
        assert mesh.pid("a") != first


async def test_a_frozen_process_can_be_ended_and_is_started_again(tmp_path: Path) -> None:
    async with _mesh(tmp_path, program("a", WORK)) as mesh:
        await mesh.reports.said("a", "ready")
        os.kill(mesh.pid("a"), signal.SIGSTOP)
        mesh.supervisor.kill("a")
        await mesh.reports.said("a", "ready", times=2)
        assert ("died", "a was ended by SIGKILL") in mesh.reports.events


async def test_a_process_that_dies_too_often_stops_the_mesh_with_its_last_lines(tmp_path: Path) -> None:
    async with _mesh(
        tmp_path, program("good", WORK), program("bad", "print('I have a bug'); raise SystemExit(1)")
    ) as mesh:
        sentence, last_line = (await mesh.failure()).splitlines()
        assert sentence.startswith("GaveUp: bad ended with status 1, too often to go on")
        assert str(tmp_path / "bad.log") in sentence
        assert last_line == "  I have a bug"
        assert mesh.reports.events.count(("bad", "I have a bug")) == 1 + HASTY.max_restarts
        assert ("stopping", "good") in mesh.reports.events


async def test_what_the_operator_must_mend_is_not_started_again_and_its_sentence_is_told(tmp_path: Path) -> None:
    code = """
    import sys
    print('{"level": "info", "event": "configured"}')
    print("executor: the model tiny is not in the store", file=sys.stderr)
    sys.exit(2)
    """
    async with _mesh(tmp_path, program("executor-1", code), program("good", WORK)) as mesh:
        assert await mesh.failure() == "OperatorError: the model tiny is not in the store"
        assert [event for event in mesh.reports.events if event[0] == "died"] == []


async def test_a_program_that_is_not_there_is_the_operators_to_mend(tmp_path: Path) -> None:
    async with _mesh(tmp_path, Program("a", ("/no/such/program",), {})) as mesh:
        assert await mesh.failure() == "OperatorError: /no/such/program: No such file or directory"


async def test_a_process_that_does_not_leave_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.cli.mesh.supervisor._GRACE_S", 0.1)
    async with _mesh(tmp_path, program("a", STUBBORN), drain_deadline_s=0.1) as mesh:
        await mesh.reports.said("a", "ready")
        await mesh.end()
        assert mesh.reports.events[-1] == ("killed", "a")


async def test_whoever_is_in_a_hurry_need_not_wait(tmp_path: Path) -> None:
    async with _mesh(tmp_path, program("a", STUBBORN), program("b", STUBBORN), drain_deadline_s=1000) as mesh:
        await mesh.reports.said("a", "ready")
        await mesh.reports.said("b", "ready")
        mesh.stop.set()
        await mesh.reports.said("stopping", "a b")
        mesh.supervisor.hurry()
        await mesh.end()
        assert mesh.reports.events[-2:] == [("killed, as asked", "a"), ("killed, as asked", "b")]


async def test_stopping_at_once_leaves_nothing(tmp_path: Path) -> None:
    async with _mesh(tmp_path, *(program(name, WORK) for name in "abcd")) as mesh:
        await asyncio.sleep(0)
        await mesh.end()


async def test_stopping_during_the_pause_before_a_restart_does_not_wait_for_it(tmp_path: Path) -> None:
    mesh_rules = RestartRules(second_delay_s=1000)
    stop, reports = asyncio.Event(), _Reports()
    supervisor = Supervisor(
        [program("a", "raise SystemExit(1)")], folder=tmp_path, reporter=reports, clock=SystemClock(), rules=mesh_rules
    )
    running = asyncio.create_task(supervisor.run(stop))
    await reports.said("died", "a ended with status 1", times=2)
    stop.set()
    await asyncio.wait_for(running, PATIENCE_S)


async def test_all_that_a_process_says_is_in_its_log(tmp_path: Path) -> None:
    code = """
    import sys
    print("out"); sys.stdout.flush()
    print("err", file=sys.stderr)
    sys.stdout.write("x" * 3_000_000 + "\\n")
    sys.stdout.write("no end"); sys.stdout.flush()
    import time; time.sleep(1000)
    """
    async with _mesh(tmp_path, program("a", code)) as mesh:
        await mesh.reports.said("a", "err")
        await mesh.reports.until(
            lambda: sum(len(text) for _, text in mesh.reports.events if text[:1] == "x") == 3_000_000
        )
    content = (tmp_path / "a.log").read_text()
    assert content.startswith("out\nerr\nxxx")
    assert content.endswith("xxx\nno end\n")


async def test_processes_have_a_group_of_their_own_and_no_input(tmp_path: Path) -> None:
    code = """
    import os, sys, time
    print(os.getpgid(0) == os.getpid(), repr(sys.stdin.read()), flush=True)
    time.sleep(1000)
    """
    async with _mesh(tmp_path, program("a", code)) as mesh:
        await mesh.reports.said("a", "True ''")


async def test_environments_are_per_process(tmp_path: Path) -> None:
    code = "import os, time; print(os.environ['WHO'], flush=True); time.sleep(1000)"
    async with _mesh(tmp_path, program("a", code, WHO="me"), program("b", code, WHO="you")) as mesh:
        await mesh.reports.said("a", "me")
        await mesh.reports.said("b", "you")


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "left by itself"), (1, "ended with status 1"), (-9, "was ended by SIGKILL"), (-99, "was ended by signal 99")],
)
def test_an_end_in_words(status: int, words: str) -> None:
    assert describe_status(status) == words


_SUPERVISE = """
import asyncio, sys
from pathlib import Path
from shared.cli.mesh.plan import Program
from shared.cli.mesh.supervisor import Supervisor
from shared.clock import SystemClock

class Quiet:
    def line(self, name, line, raw): print(raw, flush=True)
    def died(self, name, how, delay_s): pass
    def stopping(self, names): pass
    def killed(self, name): pass

code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
program = Program("a", (sys.executable, "-I", "-S", "-c", code), {})
supervisor = Supervisor([program], folder=Path(sys.argv[1]), reporter=Quiet(), clock=SystemClock())
asyncio.run(supervisor.run(asyncio.Event()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
async def test_no_process_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SUPERVISE, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = psutil.Process(int(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)))
    process.kill()
    await process.communicate()
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [child], timeout=PATIENCE_S)
    assert gone == [child] or child.status() == psutil.STATUS_ZOMBIE
