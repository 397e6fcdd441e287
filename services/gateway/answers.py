"""What the answers of both generation endpoints share: usage, and how a log-probability is told."""

from collections.abc import Sequence

import msgspec

from services.gateway.streams import Stream, total_usage
from shared.messages import TextLogprobs, Usage

_LOWEST_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class PromptDetails(msgspec.Struct):
    """Of the prompt's tokens, those whose computation was saved."""

    cached_tokens: int


class UsageBody(msgspec.Struct):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @staticmethod
    def of(usage: Usage) -> "UsageBody":
        """The usage as a client sees it."""
        num_output_tokens = sum(usage.num_output_tokens)
        return UsageBody(
            usage.num_prompt_tokens,
            num_output_tokens,
            usage.num_prompt_tokens + num_output_tokens,
            PromptDetails(usage.num_cached_tokens),
        )


def usage_of(streams: Sequence[Stream]) -> UsageBody:
    """What the requests to the mesh that belong to one client request consumed together."""
    return UsageBody.of(total_usage(streams))


class TokenLogprob(msgspec.Struct):
    """One token that could have been, or was, drawn."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ContentLogprob(msgspec.Struct):
    """One output position, in the shape of chat completions."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TokenLogprob]


class ContentLogprobs(msgspec.Struct):
    """Log-probabilities of some content."""

    content: list[ContentLogprob]
    refusal: None = None


def content_logprobs(logprobs: Sequence[TextLogprobs]) -> ContentLogprobs:
    """The positions in the shape of chat completions."""
    return ContentLogprobs(
        [
            ContentLogprob(
                position.chosen.token,
                finite(position.chosen.logprob),
                tuple(position.chosen.utf8),
                [TokenLogprob(top.token, finite(top.logprob), tuple(top.utf8)) for top in position.top],
            )
            for position in logprobs
        ]
    )


def finite(logprob: float) -> float:
    """The log-probability, or OpenAI's lowest one if it is minus infinity or below that."""
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB
