"""Streams of every kind, what they say when nothing happens to them, and how far they have come when something does."""

import asyncio
from typing import Any

from tests.integration.cast import Cast, Streamed

TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
CHAT = [{"role": "user", "content": "Who counts the sacks?"}]
NUM_TOKENS = 150


def make_bodies() -> list[dict[str, Any]]:
    """Requests of every kind, each long enough to be disturbed."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    completion = common | {"prompt": TEXT}
    return [
        completion | {"temperature": 0},
        completion | {"seed": 1, "temperature": 1.3},
        completion | {"seed": 2, "n": 2, "temperature": 1.0},
        completion | {"seed": 3, "logprobs": 3},
        completion | {"seed": 4, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        completion | {"seed": 5, "temperature": 2.0, "skip_special_tokens": False},
        completion | {"prompt": TEXT * 30, "seed": 6, "top_k": 30, "top_p": 0.9},
        completion | {"prompt": [TEXT, TEXT + "And"], "seed": 7, "n": 2},
        {"messages": CHAT, "seed": 8, "max_tokens": NUM_TOKENS, "min_tokens": 100},
        {"messages": CHAT, "seed": 9, "n": 2, "logprobs": True, "top_logprobs": 2, **common},
        {"messages": CHAT, "seed": 10, "temperature": 0.4, "min_p": 0.05, **common},
    ]


_KNOWN: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = []


async def undisturbed(mesh: Cast) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Bodies, and what they give, asked for once: it is the same in any mesh. Some are stopped by a string in the
    middle of what the others say."""
    if not _KNOWN:
        bodies = make_bodies()
        free = await mesh.stream_all(bodies)
        for number, place in ((0, 90), (1, 110), (4, 60)):
            bodies.append(bodies[number] | {"stop": [free[number].text[0][place : place + 12], "\x00never"]})
        streamed = await mesh.stream_all(bodies)
        check_same(bodies[: len(free)], streamed[: len(free)], [one.output() for one in free])
        _KNOWN.append((bodies, [stream.output() for stream in streamed]))
    return _KNOWN[0]


async def until_begun(streamed: list[Streamed], num_tokens: int) -> None:
    """Return when every request has some tokens, and all together so many."""
    async with asyncio.timeout(30):
        while not (all(s.num_tokens for s in streamed) and sum(s.num_tokens for s in streamed) >= num_tokens):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def check_same(bodies: list[dict[str, Any]], streamed: list[Streamed], expected: list[dict[str, Any]]) -> None:
    """Fails naming the first request whose output is not what was expected, and what of it."""
    for body, stream, wanted in zip(bodies, streamed, expected, strict=True):
        for name, value in stream.output().items():
            assert value == wanted[name], f"{name} of {body}"
