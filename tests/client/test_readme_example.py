"""The README's example of the client library does what it says."""

import ast
import inspect
import re
import types
from pathlib import Path

import pytest

from tests.client.fake_gateway import Conversation, FakeGateway, accepted, completed, delta

_README = Path(__file__).parents[2] / "README.md"


async def answer(peer: Conversation) -> None:
    message = await peer.receive()
    text = "Silver." if "messages" in message["body"] else "there was a fish"
    await peer.send(accepted(), delta(0, text), completed())
    await peer.closed()


async def test_example_streams_and_generates(capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = re.findall(r"```python\n(import shoal\n.*?)```", _README.read_text(), re.DOTALL)
    async with FakeGateway(answer) as gateway:
        source, num_addresses = re.subn(r'"http://127[^"]*"', repr(gateway.address), source)
        assert num_addresses == 2
        code = compile(source, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        names: dict[str, object] = {}
        running = types.FunctionType(code, names)()
        assert inspect.iscoroutine(running)
        await running
    assert capsys.readouterr().out.startswith("Silver.Usage(prompt_tokens=3")
    assert getattr(names["whole"], "text", None) == "there was a fish"
