"""Instances that a test plays, and that beat while a command listens to them for a second or so."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from subprocess import CompletedProcess

_INTERVAL_S = 0.1
_TOO_LONG_S = 0.6
"""A command that heard nothing for so long may take the instances for dead, or never have heard of them."""
_MAX_RUNS = 5
_HEARD_NOBODY = ("NATS cannot be reached", "no tokenizer beats", "no gateway of Shoal beats", "Nobody is there")
"""What a command says that stood still itself while it should have listened."""


async def run_while_beating(
    beat: Callable[[], Awaitable[None]], run: Callable[[], CompletedProcess[str]]
) -> CompletedProcess[str]:
    """How `run`, which blocks, ends while `beat` is called again and again.

    What failed is run again if this process stood still meanwhile, for then nobody beat, or if the command heard
    nobody, which it may for the same reason. Not for ever: a command that hears nobody fails its test.
    """
    num_runs = 0
    while True:
        num_runs += 1
        moments = [time.monotonic()]
        beating = asyncio.create_task(_beat_for_ever(beat, moments))
        done = await asyncio.to_thread(run)
        if beating.done():
            beating.result()
        beating.cancel()
        moments.append(time.monotonic())
        longest_s = max(later - earlier for earlier, later in pairwise(moments))
        has_heard = longest_s < _TOO_LONG_S and not any(words in done.stdout + done.stderr for words in _HEARD_NOBODY)
        if done.returncode == 0 or has_heard or num_runs == _MAX_RUNS:
            return done


async def _beat_for_ever(beat: Callable[[], Awaitable[None]], moments: list[float]) -> None:
    while True:
        await beat()
        moments.append(time.monotonic())
        await asyncio.sleep(_INTERVAL_S)
