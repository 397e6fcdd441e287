"""Completions: the body's own fields, prompts of several kinds, and the shapes of its answers."""

import codecs
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from services.gateway.answers import UsageBody, finite, usage_of
from services.gateway.bodies import UNSUPPORTED, GenerationBody, Unsupported, check_logprobs, to_draft
from services.gateway.drafts import Draft, Endpoint
from services.gateway.presentation import Presentation
from services.gateway.prompts import raw_prompts
from services.gateway.ranking import returned_choices
from services.gateway.streams import ChoiceLog, Delta, Stream
from services.gateway.validation import convert
from shared.messages import FinishReason, TextAlternative, TextLogprobs

_DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's."""
_UNSUPPORTED: Final[Unsupported] = UNSUPPORTED | {"echo": (False,), "suffix": ()}


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: int | None = None


def completion_draft(raw: dict[str, Any]) -> Draft:
    """What a completions body asks for. Raises InvalidRequest that names what is wrong with it."""
    body = convert(raw, CompletionBody, unsupported=_UNSUPPORTED)
    check_logprobs(body.logprobs, "logprobs")
    return to_draft(
        body,
        Endpoint.COMPLETION,
        prompts=raw_prompts(body.prompt, parses_special=body.parse_special_tokens),
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        num_logprobs=body.logprobs,
    )


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the shape of completions: four columns."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One choice, or the part of it in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct):
    """The whole answer, or one event of a stream: completions tell both in the same words."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"


class CompletionShape:
    """The answers to one completions request."""

    def __init__(self, presentation: Presentation, answer_id: str, streams: Sequence[Stream]) -> None:
        self._id = answer_id
        self._created = presentation.created
        self._model = presentation.model
        self._num_choices = presentation.num_choices
        self._no_usage = None if presentation.includes_usage else msgspec.UNSET
        self._logs = [log for stream in streams for log in stream.choices]
        num_columns = presentation.total_choices if presentation.has_logprobs else 0
        self._columns = [_Columns() for _ in range(num_columns)]

    def opening(self) -> list[Completion]:
        """A stream of completions has no beginning of its own."""
        return []

    def chunks(self, delta: Delta) -> list[Completion]:
        """The chunk for what is new of one choice; none if that is only tokens that nobody asked for."""
        logprobs = self._columns_of(delta) if self._columns and delta.logprobs else None
        if not delta.text and logprobs is None and delta.finish_reason is None:
            return []
        choice = CompletionChoice(delta.index, delta.text, logprobs, delta.finish_reason)
        return [Completion(self._id, self._created, self._model, [choice], self._no_usage)]

    def usage(self, streams: Sequence[Stream]) -> Completion:
        """The chunk that says what a stream consumed."""
        return Completion(self._id, self._created, self._model, [], usage_of(streams))

    def whole(self, streams: Sequence[Stream]) -> Completion:
        """The answer in one piece."""
        logs = returned_choices(streams, self._num_choices)
        choices = [self._choice(index, log) for index, log in enumerate(logs)]
        return Completion(self._id, self._created, self._model, choices, usage_of(streams))

    def _columns_of(self, delta: Delta) -> CompletionLogprobs:
        columns = self._columns[delta.index]
        if columns.num_tokens < delta.token_offset:  # told on an earlier connection; what follows is counted from there
            columns.add(self._logs[delta.index].logprobs[columns.num_tokens : delta.token_offset])
        return columns.add(delta.logprobs)

    def _choice(self, index: int, log: ChoiceLog) -> CompletionChoice:
        logprobs = self._columns[index].add(log.logprobs) if self._columns else None
        return CompletionChoice(index, log.text, logprobs, log.finish_reason)


class _Columns:
    """Tells one choice's log-probabilities, and where in its text each token begins."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def add(self, logprobs: Sequence[TextLogprobs]) -> CompletionLogprobs:
        self.num_tokens += len(logprobs)
        offsets = []
        for position in logprobs:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(position.chosen.utf8))
        return CompletionLogprobs(
            tokens=[_name(position.chosen) for position in logprobs],
            token_logprobs=[finite(position.chosen.logprob) for position in logprobs],
            top_logprobs=[
                {_name(one): finite(one.logprob) for one in (*position.top, position.chosen)} for position in logprobs
            ],
            text_offset=offsets,
        )


def _name(token: TextAlternative) -> str:
    """The token as text, or as OpenAI writes the bytes of one that is no whole character: names must not collide."""
    try:
        token.utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)
    return token.token
