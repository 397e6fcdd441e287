"""One request on a WebSocket: turns its log into the messages of the socket's protocol."""

from collections.abc import Callable, Sequence

from services.gateway.answers import UsageBody, content_logprobs, usage_of
from services.gateway.chat import chat_draft
from services.gateway.completions import completion_draft
from services.gateway.drafts import Draft
from services.gateway.failures import ErrorBody, retry_after_s
from services.gateway.frames import (
    Accepted,
    Cancelled,
    Completed,
    CreateRequest,
    Failed,
    FinishedChoice,
    ServerMessage,
    TextDelta,
    TimingBody,
)
from services.gateway.streams import Delta, End, Reader, Stream
from shared.errors import InvalidRequest, RequestError
from shared.messages import ErrorInfo, Outcome


def draft_of(message: CreateRequest) -> Draft:
    """What a `request.create` asks for. Raises InvalidRequest that names what is wrong with its body."""
    body = message.body
    if body.get("stream") is False:
        raise InvalidRequest("stream must not be false: a WebSocket always streams.", param="stream")
    if "messages" in body and "prompt" in body:
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if "messages" in body:
        return chat_draft(body | {"stream": True})
    if "prompt" in body:
        return completion_draft(body | {"stream": True})
    raise InvalidRequest("messages or prompt is missing.", param="messages")


def failed(error: RequestError, *, name: str | None = None, request_id: str | None = None) -> Failed:
    """What a client is told whose request was refused before anything was done for it."""
    return _failed(ErrorInfo.of(error), name, request_id)


class Channel:
    """One request of one connection."""

    def __init__(
        self,
        message: CreateRequest,
        draft: Draft,
        streams: Sequence[Stream],
        on_news: Callable[["Channel"], None],
    ) -> None:
        """`on_news` is called whenever `take` may have something."""
        self.name = message.id
        self.streams = streams
        self.request_id = streams[0].request_id
        self.is_over = False
        """Whether `take` has given the terminal message."""
        self._wants_token_ids = message.token_ids
        self._wants_logprobs = draft.answer.has_logprobs
        self._was_accepted = False
        self._reader = Reader(streams, lambda: on_news(self))

    def take(self) -> list[ServerMessage]:
        """The messages for everything that is new, the terminal one last and once."""
        if self.is_over:
            return []
        messages: list[ServerMessage] = []
        failure = self._reader.failure
        if not self._was_accepted and failure is None:
            if not self._reader.is_accepted:
                return []
            self._was_accepted = True
            messages.append(Accepted(self.name, self.request_id))
        messages += [self._delta(delta) for delta in self._reader.take() if self._is_worth_telling(delta)]
        if failure is not None or self._reader.is_over:
            self.is_over = True
            messages.append(self._completed() if failure is None else self._unfinished(failure))
        return messages

    def _is_worth_telling(self, delta: Delta) -> bool:
        """A finish without text is told at the end, unless it comes with tokens that the client counts on."""
        return bool(
            delta.text or (self._wants_token_ids and delta.token_ids) or (self._wants_logprobs and delta.logprobs)
        )

    def _delta(self, delta: Delta) -> TextDelta:
        message = TextDelta(self.request_id, delta.index, delta.offset, delta.text)
        if self._wants_token_ids:
            message.token_ids = delta.token_ids.tolist()
        if self._wants_logprobs:
            message.logprobs = content_logprobs(delta.logprobs).content
        return message

    def _completed(self) -> Completed:
        logs = [log for stream in self.streams for log in stream.choices]
        choices = [FinishedChoice(index, log.finish_reason) for index, log in enumerate(logs)]
        slowest = max(
            (stream.end.timing for stream in self.streams if stream.end is not None), key=lambda timing: timing.total_s
        )
        return Completed(self.name, self.request_id, choices, usage_of(self.streams), TimingBody.of(slowest))

    def _unfinished(self, end: End) -> Failed | Cancelled:
        if end.outcome is Outcome.CANCELLED:
            return Cancelled(self.name, self.request_id, UsageBody.of(end.usage) if end.usage is not None else None)
        error = end.error or ErrorInfo.of(RequestError("The request failed."))
        return _failed(error, self.name, self.request_id)


def _failed(error: ErrorInfo, name: str | None, request_id: str | None) -> Failed:
    message = Failed(ErrorBody.of(error))
    if name is not None:
        message.id = name
    if request_id is not None:
        message.request_id = request_id
    if (seconds := retry_after_s(error)) is not None:
        message.retry_after_s = seconds
    return message
