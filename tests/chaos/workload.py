"""The streams of a run: what is asked for, over which protocol, at which gateway. The same seed gives the same ones."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

MODEL: Final = "tiny"
_SENTENCE: Final = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
_STOP_STRINGS: Final = (["qu", "ver"], ["the"], ["\n\n", "ill"], ["er", "zz"])


class Protocol(Enum):
    """How a client asks."""

    WEBSOCKET = auto()
    HTTP = auto()


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One request that a client makes."""

    name: str
    protocol: Protocol
    gateway: int
    """The place of the gateway that it begins at."""
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat completion."""
        return "messages" in self.body

    @property
    def num_choices(self) -> int:
        """How many outputs it has."""
        return int(self.body.get("n", 1))


def make_streams(seed: int, count: int = 32, *, num_gateways: int = 2) -> Sequence[StreamSpec]:
    """Streams in which every option occurs, beside every protocol and kind of request."""
    draw = random.Random(seed)
    return [_make(number, draw, num_gateways) for number in range(count)]


def _make(number: int, draw: random.Random, num_gateways: int) -> StreamSpec:
    protocol = Protocol.HTTP if number % 4 == 3 else Protocol.WEBSOCKET
    body: dict[str, Any] = {"model": MODEL, "stream": True, "max_tokens": draw.randint(100, 240), "seed": number}
    text = _SENTENCE * draw.choice([1, 2, 4, 8]) + f"Number {number}: "
    if number % 2:
        body["messages"] = [{"role": "system", "content": _SENTENCE * 3}, {"role": "user", "content": text}]
    else:
        body["prompt"] = text
    body["temperature"] = 0 if number % 5 == 0 else 1.0 + number % 3 / 4
    body["ignore_eos"] = number % 8 != 6
    if number % 3 == 0:
        body |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    if number % 8 == 6:
        body["min_tokens"] = 20
    if number % 4 in (1, 3) and number % 3 != 1:
        body |= {"logprobs": True, "top_logprobs": 2} if number % 2 else {}
    if number % 8 in (0, 4):
        body["logprobs"] = 2
    if number % 7 == 2:
        body["n"] = 2
    if number % 5 == 1:
        body["stop"] = _STOP_STRINGS[number % len(_STOP_STRINGS)]
        body["min_tokens"] = 0
    if protocol is Protocol.HTTP:
        body |= {"stream_options": {"include_usage": True}, "resumable": True}
    else:
        del body["stream"]
    return StreamSpec(f"stream-{number:02}", protocol, number // 2 % num_gateways, body)
