"""`shoal chat` for one answer: a real process, a gateway that plays along; how it finds the gateway."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared import subjects
from shared.cli.chat import describe_speed
from shared.cli.mesh.ports import free_port
from shared.cli.mesh.state import MeshFolder, MeshState
from shared.cli.mesh.watch import connected
from shared.cli.stream_client import Answer
from shared.cli.terminal import printable
from shared.codec import encode
from shared.ids import InstanceId, Service
from shared.messages import GatewayStatus, Presence
from shoal import Usage
from tests.cli.beating import run_while_beating
from tests.cli.gateway import FakeGateway, completed, delta, failed, running
from tests.cli.shoal import environ, shoal
from tests.conftest import NatsServer


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with running(FakeGateway()) as gateway:
        yield gateway


class _Shell:
    def __init__(self, gateway: FakeGateway, home: Path) -> None:
        self._url = gateway.url
        self._environ = environ(home)

    async def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
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


async def test_answers_are_a_little_less_random_than_the_api_gives_them(chat: _Shell, gateway: FakeGateway) -> None:
    await chat("hi")
    assert gateway.bodies[-1]["temperature"] == 0.7


async def test_a_pipe_gives_one_answer(chat: _Shell, gateway: FakeGateway) -> None:
    assert (await chat(stdin="hi\n"))[:2] == (0, "Hello you\n")
    assert (await chat("Summarize:", stdin="a\nb\n"))[:2] == (0, "Hello you\n")
    assert _asked(gateway) == ["hi", "Summarize:\n\na\nb"]


async def test_what_is_no_text_is_an_error(chat: _Shell, gateway: FakeGateway) -> None:
    status, _, err = await chat(stdin=b"caf\xe9")
    assert (status, err) == (2, "shoal: what was piped in is not UTF-8 text (byte 3 is none of it)\n")
    status, _, err = await chat("caf\udce9")  # a byte that is not UTF-8, as Python hands it on
    assert (status, err) == (2, "shoal: the prompt is not UTF-8 text\n")
    status, _, err = await chat("hi", "--system", "caf\udce9")
    assert (status, err) == (2, "shoal: the system prompt is not UTF-8 text\n")
    assert await chat(stdin=b"\xef\xbb\xbfcaf\xc3\xa9") == (0, "Hello you\n", "")
    assert _asked(gateway) == ["café"]


async def test_an_answer_that_is_cut_off_is_told_of(chat: _Shell, gateway: FakeGateway) -> None:
    gateway.script = [delta(0, "Hel"), completed("length")]
    assert await chat("hi", "--max-tokens", "3") == (
        0,
        "Hel\n",
        "shoal: the answer is cut off: --max-tokens allows 3\n",
    )
    why = "shoal: the answer is cut off: the model's context has no room for more\n"
    assert await chat("hi") == (0, "Hel\n", why)


async def test_a_prompt_that_is_too_long_is_a_sentence_without_advice_for_conversations(
    chat: _Shell, gateway: FakeGateway
) -> None:
    gateway.script = [failed("9000 tokens are too many.", "context_length_exceeded")]
    assert await chat("hi") == (1, "", "shoal: 9000 tokens are too many\n")


async def test_a_port_names_a_gateway_of_this_machine(chat: _Shell, gateway: FakeGateway, tmp_path: Path) -> None:
    env, port = environ(tmp_path, SHOAL_NATS_URL="nats://127.0.0.1:1"), gateway.url.rpartition(":")[2]
    done = await asyncio.to_thread(shoal, "chat", "--port", port, "hi", env=env)
    assert (done.returncode, done.stdout) == (0, "Hello you\n")
    nobody = str(free_port())
    done = await asyncio.to_thread(shoal, "chat", "--port", nobody, "hi", env=env)
    assert done.stderr == f"shoal: nothing answers at http://127.0.0.1:{nobody}; start it with `shoal up`\n"
    done = await asyncio.to_thread(shoal, "chat", "--port", port, "--url", gateway.url, "hi", env=env)
    assert done.returncode == 2
    assert "--url and --port exclude each other" in done.stderr


async def test_a_port_of_a_mesh_stands_for_the_address_that_it_listens_on(gateway: FakeGateway, tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path, free_port())
    with folder.claim():
        folder.write(MeshState(gateway.url, folder.port, "nats://127.0.0.1:1", "tiny", os.getpid()))
        for arguments in (["--port", str(folder.port)], []):
            done = await asyncio.to_thread(shoal, "chat", *arguments, "hi", env=environ(tmp_path))
            assert (done.returncode, done.stdout) == (0, "Hello you\n")


async def test_the_mesh_on_the_nats_server_of_the_environment_is_asked(
    gateway: FakeGateway, tmp_path: Path, private_nats_server: NatsServer
) -> None:
    private_nats_server.start()
    env = environ(tmp_path, SHOAL_NATS_URL=private_nats_server.url)
    status = GatewayStatus(address=gateway.url)
    beat = Presence(Service.GATEWAY, InstanceId("gateway-1-a"), "gateway-1", (), status)
    async with connected(private_nats_server.url) as transport:
        done = await run_while_beating(
            lambda: transport.publish(subjects.PRESENCE, encode(beat)), lambda: shoal("chat", "hi", env=env)
        )
    assert (done.returncode, done.stdout) == (0, "Hello you\n")


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


def test_what_is_printable_stays() -> None:
    text = "é 🐟 \n\t\u200d 日本 \xa0"
    assert printable(text) == text
    assert printable("\x00\x1b\x7f\x9b") == "\N{REPLACEMENT CHARACTER}" * 4


def test_speed_in_words() -> None:
    answer = Answer(usage=Usage(10, 3, 4), first_text_s=0.25, last_text_s=1.25)
    assert describe_speed(answer) == "3 tokens · 2.0 tokens/s · first after 0.25 s · 4 of 10 prompt tokens from cache"
    assert describe_speed(Answer()) == "0 tokens"
