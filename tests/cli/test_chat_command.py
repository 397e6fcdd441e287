"""`shoal chat` as a person and as a pipe use it: a real process, a real terminal, a gateway that plays along."""

import asyncio
import os
import pty
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.cli.chat import describe_speed, printable
from shared.cli.stream_client import Answer
from tests.cli.gateway import USAGE, FakeGateway, completed, delta, failed, running
from tests.cli.shoal import COMMAND, environ, shoal
from tests.shared.transport.receiver import PATIENCE_S


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with running(FakeGateway()) as gateway:
        yield gateway


class _Shell:
    def __init__(self, gateway: FakeGateway, home: Path) -> None:
        self._url = gateway.url
        self._environ = environ(home)

    async def __call__(self, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `shoal chat`."""
        done = await asyncio.to_thread(shoal, "chat", "--url", self._url, *arguments, env=self._environ, stdin=stdin)
        return done.returncode, done.stdout, done.stderr


@pytest.fixture
def chat(gateway: FakeGateway, tmp_path: Path) -> _Shell:
    return _Shell(gateway, tmp_path)


def _asked(gateway: FakeGateway) -> list[str]:
    return [body["messages"][-1]["content"] for body in gateway.bodies]


async def test_a_prompt_gives_one_answer_and_nothing_else_on_standard_output(
    chat: _Shell, gateway: FakeGateway
) -> None:
    assert await chat("What", "is", "it?", "--system", "Be terse.", "--temperature", "0") == (0, "Hello you\n", "")
    assert gateway.bodies == [
        {
            "model": "tiny",
            "temperature": 0.0,
            "messages": [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "What is it?"}],
        }
    ]


async def test_a_pipe_gives_one_answer(chat: _Shell, gateway: FakeGateway) -> None:
    assert (await chat(stdin="hi\n"))[:2] == (0, "Hello you\n")
    assert (await chat("Summarize:", stdin="a\nb\n"))[:2] == (0, "Hello you\n")
    assert _asked(gateway) == ["hi", "Summarize:\n\na\nb"]


async def test_an_empty_pipe_is_an_error(chat: _Shell) -> None:
    assert await chat(stdin="") == (2, "", "shoal: there is nothing to answer: the pipe was empty\n")


async def test_speed_is_shown_on_request(chat: _Shell) -> None:
    status, out, err = await chat("hi", "--stats")
    assert (status, out) == (0, "Hello you\n")
    assert err.startswith("3 tokens · ")
    assert "4 of 10 prompt tokens from cache" in err


async def test_a_failure_is_a_sentence_and_status_one(chat: _Shell, gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hel"), failed("The executor is gone.")]
    assert await chat("hi") == (1, "Hel\n", "shoal: The executor is gone\n")


async def test_the_model_must_be_chosen_only_among_several(chat: _Shell, gateway: FakeGateway) -> None:
    status, _, err = await chat("hi", "--model", "huge")
    assert (status, err) == (2, f"shoal: the mesh at {gateway.url} has no model 'huge'; it has tiny\n")
    gateway.models = ["a", "b"]
    status, _, err = await chat("hi")
    assert (status, err) == (2, f"shoal: the mesh at {gateway.url} has several models; choose with --model from a, b\n")
    assert (await chat("hi", "--model", "b"))[0] == 0
    assert gateway.bodies[-1]["model"] == "b"
    gateway.models = []
    status, _, err = await chat("hi")
    assert (status, err) == (2, f"shoal: the mesh at {gateway.url} has no model yet; is it still starting?\n")


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
            raise AssertionError(f"{text!r} is not shown, but {self.shown[self._num_seen :]!r}") from None
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


@pytest.fixture
async def terminal(gateway: FakeGateway, tmp_path: Path) -> AsyncIterator[_Terminal]:
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("chat", "--url", gateway.url),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environ(tmp_path, TERM="xterm"),
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
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
    assert {"type": "request.cancel", "id": "chat"} in gateway.received


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


def test_what_is_printable_stays() -> None:
    text = "é 🐟 \n\t\u200d 日本 \xa0"
    assert printable(text) == text
    assert printable("\x00\x1b\x7f\x9b") == "\N{REPLACEMENT CHARACTER}" * 4


def test_speed_in_words() -> None:
    answer = Answer(usage=USAGE, first_text_s=0.25, last_text_s=1.25)
    assert describe_speed(answer) == "3 tokens · 2.0 tokens/s · first after 0.25 s · 4 of 10 prompt tokens from cache"
    assert describe_speed(Answer()) == "0 tokens"
