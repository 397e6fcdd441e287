"""One request on a WebSocket: turns its log into the messages of the socket's protocol."""

from collections.abc import Callable
from typing import Final

from services.gateway.accounts import UNKNOWN_OPERATION
from services.gateway.answers import UsageBody, content_logprobs, usage_of
from services.gateway.attachments import Attachment, Attachments, resumed_elsewhere
from services.gateway.chat import chat_draft
from services.gateway.completions import completion_draft
from services.gateway.drafts import Draft, Endpoint
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
from services.gateway.presentation import Presentation
from services.gateway.streams import Delta, End, Reader
from shared.errors import InvalidRequest, RequestError
from shared.ids import RequestId
from shared.messages import ErrorInfo, Outcome

_MAX_TOKENS_IN_A_FRAME: Final = 256
"""Who reads slowly, or resumes, gets much at once, and log-probabilities of a token may take a kilobyte."""


def draft_of(message: CreateRequest) -> Draft:
    """What a `request.create` asks for. Raises InvalidRequest that names what is wrong with its body."""
    body = message.body
    if body.get("stream") is False:
        raise InvalidRequest("stream must not be false: a WebSocket always streams.", param="stream")
    if "messages" in body and "prompt" in body:
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    body = body | {"stream": True, "resumable": True if body.get("resumable") is None else body["resumable"]}
    if "messages" in body:
        return chat_draft(body)
    if "prompt" in body:
        return completion_draft(body)
    raise InvalidRequest("messages or prompt is missing.", param="messages")


def operation_in(message: CreateRequest) -> str:
    """Which kind of request a `request.create` asks for, whether or not it does so rightly."""
    if ("messages" in message.body) == ("prompt" in message.body):
        return UNKNOWN_OPERATION
    return (Endpoint.CHAT if "messages" in message.body else Endpoint.COMPLETION).operation


def failed(error: RequestError, *, name: str | None = None, request_id: str | None = None) -> Failed:
    """What a client is told whose request was refused before anything was done for it."""
    return _failed(ErrorInfo.of(error), name, request_id)


class Channel:
    """One request of one connection."""

    def __init__(
        self,
        presentation: Presentation,
        read: Callable[[Callable[[], None]], Reader],
        attachments: Attachments,
        on_news: Callable[["Channel"], None],
        *,
        is_resumable: bool = True,
        is_new: bool = False,
    ) -> None:
        """`read` makes the reader, given what to call when there is something new.

        `on_news` is called whenever `take` may have something.
        """
        self.name = presentation.name
        self.is_over = False
        """Whether `take` has given the terminal message."""
        self._presentation = presentation
        self._is_new = is_new
        self._was_accepted = False
        self._notify = lambda: on_news(self)
        self._reader = read(self._notify)
        self._attachment: Attachment = attachments.attach(
            self._reader.streams, is_resumable=is_resumable, on_loss=self._notify
        )

    @property
    def request_id(self) -> RequestId:
        """What the request is resumed by."""
        return self._attachment.request_id

    async def cancel(self) -> None:
        """The client wants no more of it. What the mesh says to that can still be taken."""
        await self._attachment.cancel()

    async def leave(self, *, may_come_back: bool) -> None:
        """The connection has ended. Its client may come back only for what it has been told the id of."""
        self._reader.close()
        if may_come_back and (self._was_accepted or not self._is_new):
            await self._attachment.let_go()
        else:
            await self._attachment.cancel()

    async def finish(self) -> None:
        """The terminal message was given: stop what is left of a request that failed in part."""
        await self.leave(may_come_back=not self._was_accepted)  # one that was not resumed, for its offsets, goes on

    def take(self) -> list[ServerMessage]:
        """The messages for everything that is new, the terminal one last and once."""
        if self.is_over:
            return []
        if self._attachment.is_lost:
            return self._end(_failed(ErrorInfo.of(resumed_elsewhere()), self.name, self.request_id))
        messages: list[ServerMessage] = []
        if not self._was_accepted:
            if (refusal := self._reader.refusal) is not None:
                return self._end(self._unfinished(refusal))
            if not self._reader.is_accepted:
                return []
            self._was_accepted = True
            messages.append(Accepted(self.name, self.request_id))
        failure = self._reader.failure
        for delta in self._reader.take():
            if self._is_worth_telling(delta):
                messages += self._deltas(delta)
        if failure is not None or self._reader.is_over:
            messages += self._end(self._completed() if failure is None else self._unfinished(failure))
        return messages

    def _end(self, message: ServerMessage) -> list[ServerMessage]:
        self.is_over = True
        return [message]

    def _is_worth_telling(self, delta: Delta) -> bool:
        """A finish without text is told at the end, unless it comes with tokens that the client counts on."""
        wanted = self._presentation
        return bool(
            delta.text or (wanted.wants_token_ids and delta.token_ids) or (wanted.has_logprobs and delta.logprobs)
        )

    def _deltas(self, delta: Delta) -> list[ServerMessage]:
        """The text with the first of its tokens, and the further tokens, if there are many, without text."""
        if not (self._presentation.wants_token_ids or self._presentation.has_logprobs):
            return [TextDelta(self.request_id, delta.index, delta.offset, delta.text)]
        starts = range(0, len(delta.token_ids), _MAX_TOKENS_IN_A_FRAME) or (0,)
        return [self._piece(delta, start) for start in starts]

    def _piece(self, delta: Delta, start: int) -> TextDelta:
        offset, text = (delta.offset, delta.text) if start == 0 else (delta.offset + len(delta.text), "")
        end = start + _MAX_TOKENS_IN_A_FRAME
        message = TextDelta(self.request_id, delta.index, offset, text, delta.token_offset + start)
        if self._presentation.wants_token_ids:
            message.token_ids = delta.token_ids[start:end].tolist()
        if self._presentation.has_logprobs:
            message.logprobs = content_logprobs(delta.logprobs[start:end]).content
        return message

    def _completed(self) -> Completed:
        streams = self._reader.streams
        logs = [log for stream in streams for log in stream.choices]
        choices = [FinishedChoice(index, log.finish_reason) for index, log in enumerate(logs)]
        slowest = max(
            (stream.end.timing for stream in streams if stream.end is not None), key=lambda timing: timing.total_s
        )
        return Completed(self.name, self.request_id, choices, usage_of(streams), TimingBody.of(slowest))

    def _unfinished(self, end: End) -> Failed | Cancelled:
        if end.outcome is Outcome.CANCELLED:
            return Cancelled(self.name, self.request_id, UsageBody.of(end.usage) if end.usage is not None else None)
        failed = _failed(end.error or ErrorInfo.of(RequestError("The request failed.")), self.name, self.request_id)
        usage = usage_of(self._reader.streams)
        if usage.completion_tokens:
            failed.usage = usage
        return failed


def _failed(error: ErrorInfo, name: str | None, request_id: str | None) -> Failed:
    message = Failed(ErrorBody.of(error))
    if name is not None:
        message.id = name
    if request_id is not None:
        message.request_id = request_id
    if (seconds := retry_after_s(error)) is not None:
        message.retry_after_s = seconds
    return message
