"""`shoal chat` as a person uses it: a real process on a real terminal, a gateway that plays along."""

import asyncio
import os
import pty
import re
import signal
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.cli.gateway import FakeGateway, completed, delta, failed, running
from tests.cli.shoal import COMMAND, environ
from tests.shared.transport.receiver import PATIENCE_S


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with running(FakeGateway()) as gateway:
        yield gateway


def _asked(gateway: FakeGateway) -> list[str]:
    return [body["messages"][-1]["content"] for body in gateway.bodies]


class _Terminal:
    """`shoal chat` on a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self._master = master
        self._output = b""
        self._num_seen = 0
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    @property
    def shown(self) -> str:
        """All text so far, without what moves the cursor or colours it."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", self._output.decode(errors="ignore"))

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is gone
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._master)
        self._output += data
        self._more.set()

    async def sees(self, text: str) -> None:
        """Wait until `text` is shown after what was waited for before."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := self.shown.find(text, self._num_seen)) < 0:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            shown, status = self.shown[self._num_seen :], self.process.returncode
            raise AssertionError(f"{text!r} is not shown, but {shown!r}; exit status {status}") from None
        self._num_seen = found + len(text)

    async def prompt(self) -> None:
        """Wait until it is the person's turn."""
        await self.sees("› ")

    def types(self, text: str) -> None:
        """Type a text and Enter."""
        os.write(self._master, f"{text}\n".encode())

    def presses(self, key: bytes) -> None:
        """Press a key."""
        os.write(self._master, key)

    async def ends(self) -> int:
        """Wait for the process to end; its exit status."""
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)


CTRL_C, CTRL_D = b"\x03", b"\x04"


def _as_a_shell_does() -> None:
    """Make standard input the controlling terminal, and let Ctrl-C be heard: whoever runs tests in the background may
    have it ignored, and that is inherited."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
async def terminal(gateway: FakeGateway, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[_Terminal]:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("chat", "--url", gateway.url),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ(tmp_path, **{"TERM": "xterm", **getattr(request, "param", {})}),
        start_new_session=True,
        preexec_fn=_as_a_shell_does,
    )
    os.close(slave)
    terminal = _Terminal(process, master)
    yield terminal
    if process.returncode is None:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    asyncio.get_running_loop().remove_reader(master)
    os.close(master)


async def test_a_conversation_keeps_its_turns_and_can_be_cleared(terminal: _Terminal, gateway: FakeGateway) -> None:
    await terminal.sees(f"tiny at {gateway.url}. /help lists what else you can say.")
    await terminal.prompt()
    terminal.types("one")
    await terminal.sees("Hello you")
    await terminal.prompt()
    terminal.types("/system Be terse.")
    await terminal.sees("The system prompt is set.")
    await terminal.prompt()
    terminal.types("two")
    await terminal.sees("Hello you")
    await terminal.prompt()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == [
        "Be terse.",
        "one",
        "Hello you",
        "two",
    ]
    terminal.types("/clear")
    await terminal.sees("forgotten")
    await terminal.prompt()
    terminal.types("three")
    await terminal.sees("Hello you")
    await terminal.prompt()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["Be terse.", "three"]
    terminal.types("/exit")
    assert await terminal.ends() == 0


async def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(terminal: _Terminal, gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "On and on")]
    gateway.waits_for_cancel = True
    await terminal.prompt()
    terminal.types("go")
    await terminal.sees("On and on")
    terminal.presses(CTRL_C)
    await terminal.sees("(stopped)")
    await terminal.prompt()
    gateway.script, gateway.waits_for_cancel = [delta(0, "fine"), completed()], False
    terminal.types("again")
    await terminal.sees("fine")
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["go", "On and on", "again"]
    assert {"type": "request.cancel", "id": "stream"} in gateway.received


async def test_ctrl_c_at_the_prompt_does_nothing_and_ctrl_d_leaves(terminal: _Terminal) -> None:
    await terminal.prompt()
    prompting = asyncio.create_task(terminal.prompt())
    while not prompting.done():  # in the moment before `input` waits for keys, Python lets one Ctrl-C lie
        terminal.presses(CTRL_C)
        await asyncio.wait({prompting}, timeout=0.2)
    await prompting
    terminal.types("hi")
    await terminal.sees("Hello you")
    await terminal.prompt()
    terminal.presses(CTRL_D)
    assert await terminal.ends() == 0


async def test_lines_that_are_pasted_are_one_message(terminal: _Terminal, gateway: FakeGateway) -> None:
    await terminal.prompt()
    terminal.presses(b"\x1b[200~def f():\n    return 1\n\nf()\x1b[201~")
    terminal.types("")
    await terminal.sees("Hello you")
    await terminal.prompt()
    assert _asked(gateway) == ["def f():\n    return 1\n\nf()"]


@pytest.mark.parametrize("terminal", [{"TERM": "dumb"}], indirect=True)
async def test_a_terminal_that_does_not_mark_pastes_gives_one_message_all_the_same(
    terminal: _Terminal, gateway: FakeGateway
) -> None:
    await terminal.prompt()
    terminal.presses(b"one\ntwo\nthree")
    await terminal.sees("… two\n… three")
    terminal.types("")
    await terminal.sees("Hello you")
    await terminal.prompt()
    terminal.types("alone")
    await terminal.sees("Hello you")
    await terminal.prompt()
    assert _asked(gateway) == ["one\ntwo\nthree", "alone"]


async def test_what_is_typed_during_an_answer_is_shown_at_the_next_prompt(
    terminal: _Terminal, gateway: FakeGateway
) -> None:
    gateway.pause_after_first = asyncio.Event()
    await terminal.prompt()
    terminal.types("one")
    await terminal.sees("Hello")
    terminal.types("two")
    gateway.pause_after_first.set()
    await terminal.sees(" you")
    assert "Hello you" in terminal.shown
    await terminal.prompt()
    await terminal.sees("two")
    await terminal.sees("Hello you")
    assert _asked(gateway) == ["one", "two"]


async def test_lines_of_an_answer_end_between_words(terminal: _Terminal, gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "word " * 15), delta(75, "afterwards"), completed()]
    await terminal.prompt()
    terminal.types("go")
    await terminal.sees("word " * 15 + "\nafterwards")


async def test_an_answer_that_is_cut_off_is_told_of_in_a_conversation(
    terminal: _Terminal, gateway: FakeGateway
) -> None:
    gateway.script = [delta(0, "On and on"), completed("length")]
    await terminal.prompt()
    terminal.types("go")
    await terminal.sees("On and on\n(cut off: the model's context has no room for more)")


async def test_a_conversation_that_is_too_long_comes_with_advice(terminal: _Terminal, gateway: FakeGateway) -> None:
    await terminal.prompt()
    terminal.types("one")
    await terminal.sees("Hello you")
    await terminal.prompt()
    gateway.script = [failed("9000 tokens are too many.", "context_length_exceeded")]
    terminal.types("two")
    await terminal.sees("9000 tokens are too many; /clear shortens the conversation")


async def test_a_backslash_goes_on_with_the_next_line(terminal: _Terminal, gateway: FakeGateway) -> None:
    await terminal.prompt()
    terminal.types("first\\")
    await terminal.sees("… ")
    terminal.types("second")
    await terminal.sees("Hello you")
    assert _asked(gateway) == ["first\nsecond"]


async def test_a_failure_is_shown_and_the_conversation_goes_on_without_that_turn(
    terminal: _Terminal, gateway: FakeGateway
) -> None:
    gateway.script = [failed("The queue is full.")]
    await terminal.prompt()
    terminal.types("one")
    await terminal.sees("The queue is full")
    await terminal.prompt()
    gateway.script = [delta(0, "fine"), completed()]
    terminal.types("two")
    await terminal.sees("fine")
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["two"]


async def test_speed_can_be_switched_on_and_unknown_commands_are_said(terminal: _Terminal) -> None:
    await terminal.prompt()
    terminal.types("/nonsense")
    await terminal.sees("There is no /nonsense; /help lists what there is.")
    await terminal.prompt()
    terminal.types("/stats")
    await terminal.sees("Speed is shown.")
    await terminal.prompt()
    terminal.types("hi")
    await terminal.sees("3 tokens · ")


async def test_an_answer_cannot_command_the_terminal(terminal: _Terminal, gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "a\x1b]0;owned\x07b"), completed()]
    await terminal.prompt()
    terminal.types("hi")
    await terminal.sees("a\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}b")
