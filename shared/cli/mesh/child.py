"""One life of one process: started bound to this one, its output read to the end, its death reaped."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Self

from shared.cli.mesh import bound
from shared.cli.mesh.plan import Program

_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0
"""How long to read on after a death, should somebody else hold the pipe."""


class Child:
    """A running process. It has a process group of its own, so a terminal's Ctrl-C does not reach it."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[bytes], None]) -> None:
        self._process = process
        self._reading = asyncio.create_task(self._read(on_line))

    @classmethod
    async def start(cls, program: Program, on_line: Callable[[bytes], None]) -> Self:
        """Start `program`; `on_line` gets each line that it writes. Call it from the main thread."""
        process = await asyncio.create_subprocess_exec(
            *bound.command(list(program.command)),
            env=dict(program.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,
        )
        return cls(process, on_line)

    @property
    def is_alive(self) -> bool:
        """Whether it is not known to have died."""
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status, or minus the signal that ended it, once it is dead and its last words are read."""
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=_LAST_WORDS_S)
        self._reading.cancel()
        return status

    def terminate(self) -> None:
        """Ask it to drain and leave."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it and what it has started."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, on_line: Callable[[bytes], None]) -> None:
        assert self._process.stdout is not None
        rest = b""
        while chunk := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                on_line(line)
            if len(rest) > _MAX_LINE_BYTES:
                on_line(rest)
                rest = b""
        if rest:
            on_line(rest)
