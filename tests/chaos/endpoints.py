"""What all clients of a run have in common: where they turn to, what they say they have, how patient they are."""

import itertools
from collections.abc import Sequence
from typing import Final

import aiohttp

from tests.chaos.history import outputs
from tests.chaos.progress import Record
from tests.chaos.workload import StreamSpec

SILENCE_S: Final = 2.0
"""A gateway that says nothing for so long, not even that it lives, is left."""
PAUSE_S: Final = 0.2
RESUME_WITHIN_S: Final = 20.0
"""How long a client tries again that is told that its request cannot be had at the moment."""
TRY_AGAIN_CODES: Final = ("unavailable", "queue_full", "model_not_found")
"""Of refusals. Said of a request that was accepted, they are its end like any other."""
CONNECTION_ERRORS: Final = (aiohttp.ClientError, ConnectionError, TimeoutError, OSError)


class Turns:
    """Which gateway to try next, beginning with one's own."""

    def __init__(self, urls: Sequence[str], first: int) -> None:
        self._urls = itertools.cycle([*urls[first:], *urls[:first]])

    def next(self) -> str:
        """The address of the next one."""
        return next(self._urls)


def places(spec: StreamSpec, record: Record) -> tuple[list[int], list[int]]:
    """How many characters, and how many tokens, a client has of each choice."""
    choices = outputs(record.events, spec.num_choices)
    tokens = [len(choice.token_ids) or len(choice.logprobs) for choice in choices]
    return [len(choice.text) for choice in choices], tokens


def new_session() -> aiohttp.ClientSession:
    """What clients connect with; sets no limits of its own."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
