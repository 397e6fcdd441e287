"""`shoal pin` and `shoal unpin` as processes, against a broker with JetStream and a tokenizer of the test's."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from shared import subjects
from shared.codec import Decoder, encode
from shared.ids import InstanceId, Service
from shared.messages import (
    PINS_BUCKET,
    CallFailed,
    ChatPrompt,
    ErrorInfo,
    Int32Array,
    PinnedPrefix,
    PinsChanged,
    Presence,
    PromptTokenized,
    TextPrompt,
    TokenizePrompt,
    TokenizerStatus,
    int32s,
)
from shared.transport.nats import NatsTransport
from tests.cli.beating import run_while_beating
from tests.cli.shoal import environ, shoal
from tests.conftest import NatsServer


class _Mesh:
    """A broker with a tokenizer whose tokens are code points, and what schedulers would hear."""

    def __init__(self, url: str, home: Path) -> None:
        self.transport = NatsTransport(url, name="test")
        self.changes: list[str] = []
        self.refusal: ErrorInfo | None = None
        self._url = url
        self._home = home

    async def run(self, *arguments: str, stdin: str | None = None) -> CompletedProcess[str]:
        command = (*arguments, "--nats-url", self._url)
        return await run_while_beating(self.beat, lambda: shoal(*command, env=environ(self._home), stdin=stdin))

    async def pinned(self) -> dict[str, PinnedPrefix]:
        entries = await self.transport.bucket(PINS_BUCKET).entries()
        return {name: Decoder[PinnedPrefix](PinnedPrefix).decode(payload) for name, payload in entries.items()}

    async def beat(self) -> None:
        beat = Presence(Service.TOKENIZER, InstanceId("tokenizer-1"), "tokenizer-1", ("tiny",), TokenizerStatus(8192))
        await self.transport.publish(subjects.presence(Service.TOKENIZER), encode(beat))

    async def on_question(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        question = Decoder[TokenizePrompt](TokenizePrompt).decode(payload)
        answer: PromptTokenized | CallFailed
        if self.refusal is not None:
            answer = CallFailed(question.call_id, self.refusal)
        else:
            match question.prompt:
                case ChatPrompt(messages=messages):
                    text = "".join(f"<{message.role}>{message.content}" for message in messages)
                case TextPrompt(text=text):
                    pass
                case _:
                    raise AssertionError(question.prompt)
            answer = PromptTokenized(question.call_id, int32s(map(ord, text)), 8192)
        await self.transport.publish(subjects.inbox(question.gateway_id), encode(answer))

    async def on_change(self, payload: bytes, _headers: Mapping[str, str]) -> None:
        self.changes.append(Decoder[PinsChanged](PinsChanged).decode(payload).name)


@pytest.fixture
async def mesh(private_nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[_Mesh]:
    private_nats_server.start()
    mesh = _Mesh(private_nats_server.url, tmp_path)
    await mesh.transport.connect()
    await mesh.transport.subscribe(subjects.tokenize("tiny"), mesh.on_question)
    await mesh.transport.subscribe(subjects.PINS, mesh.on_change)
    yield mesh
    await mesh.transport.close()


def _text(token_ids: Int32Array) -> str:
    return "".join(map(chr, token_ids))


async def test_a_system_prompt_is_pinned_with_what_every_chat_with_it_begins_with(mesh: _Mesh) -> None:
    done = await mesh.run("pin", "clerk", "--system", "Count sacks.")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "clerk is pinned: the first 26 tokens of such prompts to tiny\n"
    (pin,) = (await mesh.pinned()).values()
    assert (pin.model, pin.tenant, _text(pin.token_ids)) == ("tiny", "default", "<system>Count sacks.<user>")
    assert mesh.changes == ["clerk"]


async def test_pins_are_listed_and_unpinned(mesh: _Mesh) -> None:
    done = await mesh.run("pin", "story", "--raw", "--file", "-", "--tenant", "acme", stdin="Once upon a time\n")
    assert done.returncode == 0, done.stderr
    assert _text((await mesh.pinned())["story"].token_ids) == "Once upon a time"
    listed = await mesh.run("pin")
    assert listed.stdout == "story: 16 tokens of tiny, for acme\n"
    done = await mesh.run("unpin", "story")
    assert (done.returncode, done.stdout) == (0, "story is pinned no longer\n")
    assert await mesh.pinned() == {}
    assert mesh.changes == ["story", "story"]


async def test_unpinning_what_is_not_pinned_says_what_is(mesh: _Mesh) -> None:
    await mesh.run("pin", "story", "--raw", "--file", "-", stdin="Once upon a time")
    done = await mesh.run("unpin", "tale")
    assert (done.returncode, done.stderr) == (2, "shoal: nothing is pinned as 'tale'; there is story\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("pin", "a.b", "--system", "x"), "'a.b' cannot name a pin"),
        (("pin", "clerk"), "either --system or --file"),
        (("pin", "--system", "x"), "needs a NAME"),
        (("pin", "clerk", "--system", "x", "--model", "huge"), "the mesh has no model 'huge'; it has tiny"),
        (("pin", "clerk", "--raw", "--system", ""), "the text has no tokens"),
    ],
)
async def test_what_cannot_be_pinned_is_said(mesh: _Mesh, arguments: tuple[str, ...], words: str) -> None:
    done = await mesh.run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert await mesh.pinned() == {}


async def test_what_the_tokenizer_refuses_is_not_pinned(mesh: _Mesh) -> None:
    mesh.refusal = ErrorInfo(400, "invalid_request_error", "invalid_value", "this template has no system prompt")
    done = await mesh.run("pin", "clerk", "--system", "Count sacks.")
    assert (done.returncode, done.stderr) == (
        2,
        "shoal: the prompt cannot be tokenized: this template has no system prompt\n",
    )
    assert await mesh.pinned() == {}


async def test_a_broker_without_jetstream_is_the_operators_to_mend(
    private_nats_server: NatsServer, tmp_path: Path
) -> None:
    private_nats_server.has_jetstream = False
    private_nats_server.start()
    done = await asyncio.to_thread(shoal, "pin", "--nats-url", private_nats_server.url, env=environ(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("shoal: the pins cannot be read: ")
    assert "JetStream" in done.stderr
