"""What a request gives: pieces of text as they come, and the whole at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have been drawn."""

    token: str
    logprob: float
    utf8: bytes
    """The token's own bytes, which need not be whole characters."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """The token that was drawn at one position, and the likeliest ones there."""

    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. All deltas of a choice, put together, are its text."""

    index: int
    """Of the choice."""
    offset: int
    """How many characters (code points) of the choice come before `text`."""
    text: str
    token_ids: tuple[int, ...] = ()
    """Tokens whose text came with, or before, `text`; only with `token_ids=True`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the same tokens; only if they were asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request consumed, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Of the prompt's, those whose computation was saved."""

    @property
    def total_tokens(self) -> int:
        """Of prompt and output."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time went, in seconds since the request reached a scheduler, whichever went on with it since."""

    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output."""

    index: int
    text: str
    finish_reason: str
    """`stop` or `length`."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A request that is complete."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """Of the first choice."""
        return self.choices[0].finish_reason


def usage_of(body: Mapping[str, Any]) -> Usage:
    """The usage in a terminal event."""
    return Usage(
        int(body["prompt_tokens"]), int(body["completion_tokens"]), int(body["prompt_tokens_details"]["cached_tokens"])
    )


def logprobs_of(positions: Sequence[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    """The log-probabilities in a delta."""
    return tuple(
        TokenLogprob(
            position["token"],
            position["logprob"],
            bytes(position["bytes"]),
            tuple(Alternative(top["token"], top["logprob"], bytes(top["bytes"])) for top in position["top_logprobs"]),
        )
        for position in positions
    )
