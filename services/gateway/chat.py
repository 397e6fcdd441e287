"""Chat completions: the body's own fields, and the shapes of its answers."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from services.gateway.answers import ContentLogprobs, UsageBody, content_logprobs, usage_of
from services.gateway.bodies import UNSUPPORTED, GenerationBody, Unsupported, check_logprobs, to_draft
from services.gateway.drafts import Draft, Endpoint
from services.gateway.presentation import Presentation
from services.gateway.ranking import returned_choices
from services.gateway.streams import ChoiceLog, Delta, Stream
from services.gateway.templates import ChatTurn, chat_prompt
from services.gateway.validation import MAX_INT32, check_range, convert
from shared.errors import InvalidRequest
from shared.messages import FinishReason

_UNSUPPORTED: Final[Unsupported] = UNSUPPORTED | {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "parallel_tool_calls": (),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatTurn]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_draft(raw: dict[str, Any]) -> Draft:
    """What a chat completions body asks for. Raises InvalidRequest that names what is wrong with it."""
    body = convert(raw, ChatBody, unsupported=_UNSUPPORTED)
    return to_draft(
        body,
        Endpoint.CHAT,
        prompts=(chat_prompt(body.messages, body.chat_template_kwargs, body.parse_special_tokens),),
        max_tokens=_max_tokens(body),
        num_logprobs=_num_logprobs(body),
    )


def _max_tokens(body: ChatBody) -> int | None:
    check_range(body.max_completion_tokens, "max_completion_tokens", 1, MAX_INT32)
    if body.max_completion_tokens is None or body.max_tokens in (None, body.max_completion_tokens):
        return body.max_completion_tokens or body.max_tokens
    raise InvalidRequest("max_tokens and max_completion_tokens must not differ.", param="max_completion_tokens")


def _num_logprobs(body: ChatBody) -> int | None:
    check_logprobs(body.top_logprobs, "top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs is only allowed with logprobs: true.", param="top_logprobs")
    return None


class ChatMessageBody(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One whole choice."""

    index: int
    message: ChatMessageBody
    logprobs: ContentLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(msgspec.Struct):
    """The whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    object: str = "chat.completion"


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message; empty in the last one."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    """The part of one choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ContentLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChunkChoice, ...]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "chat.completion.chunk"


_END: Final = ChatDelta()


class ChatShape:
    """The answers to one chat request."""

    def __init__(self, presentation: Presentation, answer_id: str) -> None:
        self._id = answer_id
        self._created = presentation.created
        self._model = presentation.model
        self._num_choices = presentation.num_choices
        self._has_logprobs = presentation.has_logprobs
        self._no_usage = None if presentation.includes_usage else msgspec.UNSET

    def opening(self) -> list[ChatChunk]:
        """The chunks that begin a stream: who speaks."""
        delta = ChatDelta(role="assistant", content="")
        return [self._chunk(ChatChunkChoice(index, delta)) for index in range(self._num_choices)]

    def chunks(self, delta: Delta) -> list[ChatChunk]:
        """The chunks for what is new of one choice: its text, if any, and then its finish reason, if it has one."""
        logprobs = content_logprobs(delta.logprobs) if self._has_logprobs and delta.logprobs else None
        chunks = []
        if delta.text or (logprobs is not None and delta.finish_reason is None):
            chunks.append(self._chunk(ChatChunkChoice(delta.index, ChatDelta(content=delta.text or None), logprobs)))
            logprobs = None
        if delta.finish_reason is not None:
            chunks.append(self._chunk(ChatChunkChoice(delta.index, _END, logprobs, delta.finish_reason)))
        return chunks

    def usage(self, streams: Sequence[Stream]) -> ChatChunk:
        """The chunk that says what a stream consumed."""
        return ChatChunk(self._id, self._created, self._model, (), usage_of(streams))

    def whole(self, streams: Sequence[Stream]) -> ChatCompletion:
        """The answer in one piece."""
        logs = returned_choices(streams, self._num_choices)
        choices = [self._choice(index, log) for index, log in enumerate(logs)]
        return ChatCompletion(self._id, self._created, self._model, choices, usage_of(streams))

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, (choice,), self._no_usage)

    def _choice(self, index: int, log: ChoiceLog) -> ChatChoice:
        logprobs = content_logprobs(log.logprobs) if self._has_logprobs else None
        return ChatChoice(index, ChatMessageBody(log.text), logprobs, log.finish_reason)
