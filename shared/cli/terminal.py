"""The terminal or pipe that a person talks through: what is typed, pasted or piped in, and what is safe to show."""

import contextlib
import os
import select
import sys
import termios
from collections.abc import Iterator
from typing import Final

from shared.cli.conversation import join_lines
from shared.errors import OperatorError

_FIRST, _NEXT = "› ", "… "
_PASTE_PAUSE_S: Final = 0.02
"""Pasted lines come at once; nobody types a line so fast."""
_FIRST_READLINE_WITH_PASTES: Final = 0x0700


class Prompt:
    """Reads what a person says. Many lines that are pasted at once are one text."""

    def __init__(self) -> None:
        self._knows_pastes = _switch_on_pastes()

    def read(self) -> str:
        """The next text. Raises EOFError when the person leaves, and KeyboardInterrupt."""
        lines = [self._read_line(_FIRST)]
        while lines[-1].endswith("\\"):
            lines.append(self._read_line(_NEXT))
        return join_lines(lines)

    def _read_line(self, prompt: str) -> str:
        lines = [input(prompt)]
        if self._knows_pastes or lines[0].startswith("/"):
            return lines[0]
        while _has_more():
            lines.append(input(_NEXT))
        return "\n".join(lines)


def _switch_on_pastes() -> bool:
    """Whether `input` can tell what is pasted from what is typed; this also gives it editing and history."""
    try:
        import readline
    except ImportError:  # not everywhere
        return False
    if getattr(readline, "_READLINE_VERSION", 0) < _FIRST_READLINE_WITH_PASTES or "libedit" in (readline.__doc__ or ""):
        return False
    readline.parse_and_bind("set enable-bracketed-paste on")
    return os.environ.get("TERM", "dumb") != "dumb"


def _has_more() -> bool:
    """Whether something is there already, be it only the beginning of a line."""
    with _without(termios.ICANON | termios.ECHO):
        return bool(select.select([sys.stdin], [], [], _PASTE_PAUSE_S)[0])


@contextlib.contextmanager
def unechoed() -> Iterator[None]:
    """What is typed in the meantime is kept for the next prompt, and not shown in the middle of an answer."""
    with _without(termios.ECHO) if _is_in_foreground() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _without(flags: int) -> Iterator[None]:
    """The terminal without some of what it does to what is typed."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, [*before[:3], before[3] & ~flags, *before[4:]])
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_in_foreground() -> bool:
    """Whether standard input is a terminal that is ours to change."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def read_pipe() -> str:
    """All of standard input, without empty lines at its end. Raises OperatorError if that is not text."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").rstrip("\n")
    except UnicodeDecodeError as error:
        raise OperatorError(f"what was piped in is not UTF-8 text (byte {error.start} is none of it)") from None


def check_is_text(text: str, what: str) -> None:
    """Raises OperatorError if bytes that are not UTF-8 came in through the command line or the keyboard."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise OperatorError(f"{what} is not UTF-8 text") from None


def printable(text: str) -> str:
    """Text that cannot command a terminal: control characters other than tab and line end are replaced."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) >= 0xA0 else "\N{REPLACEMENT CHARACTER}" for c in text)
