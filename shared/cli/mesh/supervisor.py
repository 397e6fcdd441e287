"""Keeps the processes of a mesh alive, and stops them in order.

Owns the processes, their restarts and their log files. Does not know what they do, nor whether the mesh serves.
A process that dies is started again, with growing pauses and within bounds; one that ends with the operator's exit
status is not, because starting it again does not help.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from shared.cli.mesh import bound
from shared.cli.mesh.child import Child
from shared.cli.mesh.log_files import LogFile, LogLine, read_line
from shared.cli.mesh.plan import Program, in_order
from shared.cli.mesh.restarts import RestartPolicy, RestartRules
from shared.clock import Clock
from shared.errors import OperatorError, ShoalError
from shared.process import EXIT_OPERATOR

_GRACE_S = 3.0
"""On top of the drain deadline, before a process that does not leave is killed."""


class Reporter(Protocol):
    """Who is told what happens to the processes."""

    def line(self, name: str, line: LogLine, raw: str) -> None:
        """A process wrote a line."""
        ...

    def died(self, name: str, how: str, delay_s: float) -> None:
        """A process died, and is started again after `delay_s`."""
        ...

    def stopping(self, names: Sequence[str]) -> None:
        """These were told to stop now."""
        ...

    def killed(self, name: str, *, was_asked: bool) -> None:
        """A process was killed: because somebody was in a hurry, or because it did not stop in time."""
        ...


class GaveUp(ShoalError):
    """A process died too often. The message names it and ends with the last lines of its log."""


class Supervisor:
    """The processes of one mesh."""

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        folder: Path,
        reporter: Reporter,
        clock: Clock,
        rules: RestartRules | None = None,
        drain_deadline_s: float = 20.0,
        environ_of_life: Callable[[str], Mapping[str, str]] = lambda _name: {},
    ) -> None:
        """`folder` takes the log files. Creates them, and raises OSError if it cannot. `environ_of_life` gives what the
        next life of a process has in its environment beside what its program says."""
        self._programs = programs
        self._reporter = reporter
        self._clock = clock
        self._rules = rules
        self._environ_of_life = environ_of_life
        self._patience_s = drain_deadline_s + _GRACE_S
        self._logs = {program.name: LogFile(folder / f"{program.name}.log") for program in programs}
        self._children: dict[str, Child] = {}
        self._stopping = asyncio.Event()
        self._must_hurry = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep all processes alive until `stop` is set, then stop them; when this returns or raises, none is left.

        Raises OperatorError with the sentence of a process that must not be restarted, and GaveUp.
        """
        keepers = [asyncio.create_task(self._keep(program)) for program in self._programs]
        told = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({told, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            await self._stop_all(self._patience_s if told.done() else _GRACE_S)
        finally:
            told.cancel()
            self._stopping.set()
            for child in self._children.values():
                child.kill()
            outcomes = await asyncio.gather(*keepers, return_exceptions=True)
            for log in self._logs.values():
                log.close()
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def pid(self, name: str) -> int | None:
        """The process id of what has this name, if it runs."""
        child = self._children.get(name)
        return child.pid if child else None

    def kill(self, name: str) -> None:
        """End one process that has stopped to work; it is started again like any other that died."""
        if child := self._children.get(name):
            child.kill()

    def hurry(self) -> None:
        """Wait no longer for processes to drain: kill them."""
        self._must_hurry.set()

    async def _keep(self, program: Program) -> None:
        policy = RestartPolicy(self._clock, self._rules)
        while not self._stopping.is_set():
            status = await self._live_once(program)
            if self._stopping.is_set():
                return
            if status in (EXIT_OPERATOR, bound.EXIT_NO_PROGRAM):
                raise OperatorError(self._sentence(program.name))
            delay_s = policy.next_delay_s()
            if delay_s is None:
                raise GaveUp(self._obituary(program.name, status))
            self._reporter.died(program.name, describe_status(status), delay_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live_once(self, program: Program) -> int:
        log = self._logs[program.name]
        log.tail.clear()

        def on_line(line: bytes) -> None:
            log.write(line)
            self._reporter.line(program.name, read_line(log.tail[-1]), log.tail[-1])

        life = replace(program, environ={**program.environ, **self._environ_of_life(program.name)})
        child = self._children[program.name] = await Child.start(life, on_line)
        if self._stopping.is_set():  # it came too late to be told
            child.kill()
        try:
            return await child.wait()
        finally:
            del self._children[program.name]

    async def _stop_all(self, patience_s: float) -> None:
        hurrying = asyncio.create_task(self._hurried())
        for wave in in_order(self._programs):
            running = {program.name: self._children[program.name] for program in wave if program.name in self._children}
            if not running:
                continue
            self._reporter.stopping(list(running))
            for child in running.values():
                child.terminate()
            leaving = asyncio.create_task(_all_dead(running.values()))
            await asyncio.wait({leaving, hurrying}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for name in [name for name, child in running.items() if child.is_alive]:
                self._reporter.killed(name, was_asked=self._must_hurry.is_set())
                running[name].kill()
            await leaving
        hurrying.cancel()

    async def _hurried(self) -> None:
        await self._must_hurry.wait()

    def _sentence(self, name: str) -> str:
        """The last thing that a process said to the operator."""
        said = [line for line in self._logs[name].tail if read_line(line).level is None and line.strip()]
        service = name.rpartition("-")[0] or name
        return said[-1].removeprefix(f"{service}: ") if said else f"{name} cannot start; see {self._logs[name].path}"

    def _obituary(self, name: str, status: int) -> str:
        lines = [f"  {read_line(line).text}" for line in self._logs[name].tail]
        return "\n".join(
            [
                f"{name} {describe_status(status)}, too often to go on; its last lines, from {self._logs[name].path}:",
                *lines,
            ]
        )


async def _all_dead(children: Iterable[Child]) -> None:
    for child in children:
        await child.wait()


def describe_status(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return "left by itself" if status == 0 else f"ended with status {status}"


def is_trouble(line: LogLine) -> bool:
    """Whether a line is worth a person's attention."""
    return line.level is not None and line.level >= logging.WARNING
