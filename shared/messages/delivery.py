"""Delivery: scheduler → detokenizer → gateway, one message a destination and step, and the stop strings found.

A choice's output is an append-only log of tokens. Every entry says where in the log it stands (`offset`), every piece
of text where in the text (`char_offset`), so a receiver knows what it already has and what is missing. Who misses
something asks for all of it again (`ReplayLog`, and `ReplayRequest` in `requests`) and drops what it has.
"""

from enum import StrEnum

from shared.ids import InstanceId, RequestId
from shared.messages.base import FinishReason, Int32Array, Message
from shared.messages.requests import ErrorInfo, TextOptions
from shared.messages.steps import TokenLogprobs
from shared.messages.traces import TraceContext


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Usage(Message, frozen=True):
    """What a request consumed."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found in the prefix cache."""
    num_output_tokens: tuple[int, ...]
    """For each choice."""


class Timing(Message, frozen=True):
    """Where a request's time went, in seconds since its arrival at its first scheduler."""

    queue_s: float = 0.0
    """From arrival to the first step."""
    first_token_s: float = 0.0
    """From arrival to the first output token."""
    total_s: float = 0.0


class RequestOpened(Message, frozen=True):
    """What a detokenizer must know of a request before its first tokens."""

    request_id: RequestId
    scheduler_id: InstanceId
    gateway_id: InstanceId
    model: str
    text: TextOptions
    num_choices: int
    attempt: int = 1
    """Which submission of the request this is (`SubmitRequest.attempt`): a higher one replaces what is known of it."""
    replay: int = 0
    """Grows whenever all of a request is to be said once more: its detokenizer begins again, from the first token."""
    trace: TraceContext | None = None


class ChoiceTokens(Message, frozen=True, gc=False):
    """Entries `offset, offset + 1, …` of one choice's log.

    One for every token: Python's garbage collector need not look at them (`gc=False`), they are never in a cycle.
    """

    request_id: RequestId
    index: int
    offset: int
    token_ids: Int32Array
    finish_reason: FinishReason | None = None
    """Set on the last entry, which may have no tokens."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()


class RequestClosed(Message, frozen=True):
    """The end of a request, after all its tokens."""

    request_id: RequestId
    outcome: Outcome
    usage: Usage
    timing: Timing = Timing()
    error: ErrorInfo | None = None
    attempt: int = 1
    """Which submission of the request ended."""


class DecodeTokens(Message, frozen=True, tag="decode_tokens"):
    """Scheduler → detokenizer: everything one step produced for it, in this order."""

    scheduler_id: InstanceId
    opened: tuple[RequestOpened, ...] = ()
    tokens: tuple[ChoiceTokens, ...] = ()
    closed: tuple[RequestClosed, ...] = ()


class ReplayLog(Message, frozen=True, tag="replay_log"):
    """Detokenizer → scheduler: entries of this request are missing here, or all I know of it; send its whole log."""

    request_id: RequestId
    detokenizer_id: InstanceId


class StopStringFound(Message, frozen=True, tag="stop_string_found"):
    """Detokenizer → scheduler: the choice's text reached a stop string with its first `num_tokens` tokens."""

    request_id: RequestId
    index: int
    num_tokens: int


class TextAlternative(Message, frozen=True):
    """One token as text, with its log-probability."""

    token: str
    logprob: float
    utf8: bytes
    """The token's own bytes, which need not be whole characters."""
    token_id: int = -1


class TextLogprobs(Message, frozen=True):
    """Log-probabilities at one output position."""

    chosen: TextAlternative
    top: tuple[TextAlternative, ...] = ()


class ChoiceText(Message, frozen=True):
    """Text from character `char_offset` of one choice, made of the log's tokens from `token_offset`.

    The text may lag behind the tokens: an unfinished character or a possible stop string is held back.
    """

    request_id: RequestId
    index: int
    token_offset: int
    token_ids: Int32Array
    char_offset: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TextLogprobs, ...] = ()
    """Of the last of these tokens; fewer than tokens only where nobody knows the others any more."""
    attempt: int = 1
    """Which submission of the request it is from. What an attempt says at its end, when it was stopped in the middle of
    a character, the next one does not say."""


class TextProduced(Message, frozen=True, tag="text_produced"):
    """Detokenizer → gateway: everything one step produced for it, texts before ends."""

    detokenizer_id: InstanceId
    texts: tuple[ChoiceText, ...] = ()
    closed: tuple[RequestClosed, ...] = ()
