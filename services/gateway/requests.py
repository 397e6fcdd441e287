"""The gateway's open requests: sent until somebody takes them, followed until they end, cancelled until that is known.

A table without I/O: every event returns the messages to send. Each request ends in exactly one terminal event, whatever
the mesh does. A request that ended here but perhaps not in the mesh (cancelled, stalled, incomplete) stays in the table
until the mesh confirms, so that a lost cancellation is sent again.

A later version can submit the request of a lost scheduler to another one, with the tokens that it already has, where
this one fails it (`scheduler_lost`).
"""

import logging
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from services.gateway.config import GatewayConfig
from services.gateway.streams import End, OutputGap, Stream
from shared import subjects
from shared.codec import encode
from shared.errors import DeadlineExceeded, RequestError, Stalled, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import (
    CancelRequest,
    ChoiceText,
    ErrorInfo,
    Outcome,
    RequestAccepted,
    RequestClosed,
    RequestRefused,
    SubmitRequest,
    TextProduced,
)

log = logging.getLogger(__name__)

Outgoing = tuple[str, bytes]
"""A subject and what to publish on it."""

_REPEAT_CANCEL_AFTER_S = 1.0
_DEADLINE_GRACE_S = 1.0
"""A request's time runs at its scheduler, which says what it consumed. So much later it ends here in any case."""
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class OpenRequest:
    """One request to the mesh that is not known to have ended there."""

    stream: Stream
    model: str
    tenant: str
    scheduler_id: InstanceId
    submission: Outgoing | None
    """How to send it again; None once it is accepted."""
    opened_at: float
    sent_at: float
    heard_at: float
    deadline: float = math.inf
    num_submissions: int = 1
    detokenizer_id: InstanceId | None = None
    """Known from its first text on."""
    bereft_at: float | None = None
    """Since when its detokenizer is gone; its scheduler may give it to another one, which says all of it again."""
    cancelled_at: float | None = None
    cancel_sent_at: float = 0.0


class OpenRequests:
    """All open requests of this gateway, by id."""

    def __init__(self, gateway_id: InstanceId, config: GatewayConfig) -> None:
        self.num_ended: Counter[Outcome] = Counter()
        self.num_orphans = 0
        """Messages about requests that are not open."""
        self._gateway_id = gateway_id
        self._config = config
        self._requests: dict[RequestId, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def open(self, message: SubmitRequest, submission: Outgoing, now: float) -> Stream:
        """Follow a request that is being sent: the log that it will have. `submission` is what sends it."""
        stream = Stream(message.request_id, message.num_choices)
        request = OpenRequest(stream, message.model, message.tenant, message.scheduler_id, submission, now, now, now)
        if message.timeout_ms is not None:
            request.deadline = now + message.timeout_ms / 1000 + _DEADLINE_GRACE_S
        self._requests[stream.request_id] = request
        return stream

    def submission(self, request_id: RequestId) -> list[Outgoing]:
        """What sends a request that was opened, if it is still wanted."""
        request = self._requests.get(request_id)
        return [request.submission] if request is not None and request.submission is not None else []

    # What the mesh says.

    def accepted(self, message: RequestAccepted, now: float) -> None:
        """A scheduler has taken a request."""
        if (request := self._find(message.request_id)) is not None:
            self._accept(request, now)

    def refused(self, message: RequestRefused) -> None:
        """A request was never started. Means nothing about one that was accepted: then it answers a repetition."""
        request = self._find(message.request_id)
        if request is None or request.stream.is_accepted:
            return
        if request.cancelled_at is None:
            self._settle(request, End(Outcome.FAILED, error=message.error))
        else:
            self._settle(request, End(Outcome.CANCELLED))

    def text_produced(self, message: TextProduced, now: float) -> list[Outgoing]:
        """Text and ends of any number of requests."""
        outgoing: list[Outgoing] = []
        for text in message.texts:
            if (request := self._find(text.request_id)) is not None:
                request.detokenizer_id, request.bereft_at = message.detokenizer_id, None
                outgoing += self._text(request, text, now)
        for closed in message.closed:
            if (request := self._find(closed.request_id)) is not None:
                self._settle(request, _end_of(request, closed))
        return outgoing

    def scheduler_lost(self, scheduler_id: InstanceId, now: float) -> list[Outgoing]:
        """A scheduler is gone, and with it what it held."""
        lost = [request for request in self._requests.values() if request.scheduler_id == scheduler_id]
        error = _unavailable("The scheduler that held this request is gone.")
        return [message for request in lost for message in self._abandon(request, error, now)]

    def detokenizer_lost(self, detokenizer_id: InstanceId, models_without: Collection[str], now: float) -> None:
        """A detokenizer is gone. `models_without` have none left: whoever had no text yet is as badly off."""
        for request in self._requests.values():
            had_text = request.detokenizer_id is not None
            is_bereft = request.detokenizer_id == detokenizer_id if had_text else request.model in models_without
            if is_bereft:
                request.bereft_at = now

    def detokenizer_found(self, models: Collection[str]) -> None:
        """A detokenizer takes work for `models`: what waits for its first text can have it from this one."""
        for request in self._requests.values():
            if request.detokenizer_id is None and request.model in models:
                request.bereft_at = None

    # What the client wants, and what time brings.

    def cancel(self, request_id: RequestId, now: float) -> list[Outgoing]:
        """Stop a request; the mesh confirms with its end. Nothing happens to one that is cancelled or ended already."""
        request = self._requests.get(request_id)
        if request is None or request.cancelled_at is not None:
            return []
        return self._cancel(request, now)

    def end_all(self, error: RequestError, now: float) -> list[Outgoing]:
        """Fail whatever is still open."""
        return [message for request in list(self._requests.values()) for message in self._abandon(request, error, now)]

    def tick(self, now: float) -> list[Outgoing]:
        """Time has passed: repeat what nobody answered, fail what waited too long."""
        return [message for request in list(self._requests.values()) for message in self._check(request, now)]

    def _find(self, request_id: RequestId) -> OpenRequest | None:
        request = self._requests.get(request_id)
        if request is None:
            self.num_orphans += 1
        return request

    def _accept(self, request: OpenRequest, now: float) -> None:
        request.submission = None
        request.heard_at = now
        request.stream.accept()

    def _text(self, request: OpenRequest, text: ChoiceText, now: float) -> list[Outgoing]:
        if not 0 <= text.index < len(request.stream.choices):
            return self._abandon(request, _unavailable("A service sent a choice that was not asked for."), now)
        self._accept(request, now)  # an acceptance that is late, or lost, changes nothing
        try:
            request.stream.append(text)
        except OutputGap:
            return self._abandon(request, _incomplete(), now)
        return []

    def _check(self, request: OpenRequest, now: float) -> list[Outgoing]:
        if request.cancelled_at is not None:
            return self._press(request, now)
        if now >= request.deadline:
            return self._abandon(request, DeadlineExceeded("The request's timeout_ms is over."), now)
        if request.submission is not None:
            return self._submit_again(request, request.submission, now)
        if request.bereft_at is not None and now - request.bereft_at >= self._config.failover_timeout_s:
            return self._abandon(request, _unavailable("The detokenizer of this request is gone."), now)
        if request.detokenizer_id is None and now - request.opened_at >= self._config.queue_timeout_s:
            waited = self._config.queue_timeout_s
            return self._abandon(request, Stalled(f"The request waited {waited:g} s and produced nothing."), now)
        if request.detokenizer_id is not None and now - request.heard_at >= self._config.stall_timeout_s:
            silent = self._config.stall_timeout_s
            return self._abandon(request, Stalled(f"The mesh went silent for {silent:g} s in mid-request."), now)
        return []

    def _submit_again(self, request: OpenRequest, submission: Outgoing, now: float) -> list[Outgoing]:
        if now - request.sent_at < self._config.resubmit_after_s:
            return []
        if request.num_submissions >= self._config.max_submissions:
            return self._abandon(request, _unavailable("No service took the request in time."), now)
        request.num_submissions += 1
        request.sent_at = now
        return [submission]

    def _press(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Cancel again while the mesh does not confirm; after a while believe it without."""
        assert request.cancelled_at is not None
        if now - request.cancelled_at >= self._config.cancel_timeout_s:
            self._settle(request, End(Outcome.CANCELLED))
            return []
        if now - request.cancel_sent_at < _REPEAT_CANCEL_AFTER_S:
            return []
        return [self._cancellation(request, now)]

    def _cancel(self, request: OpenRequest, now: float) -> list[Outgoing]:
        request.cancelled_at = now
        request.submission = None
        return [self._cancellation(request, now)]

    def _cancellation(self, request: OpenRequest, now: float) -> Outgoing:
        request.cancel_sent_at = now
        message = CancelRequest(request.stream.request_id, self._gateway_id)
        return subjects.inbox(request.scheduler_id), encode(message)

    def _abandon(self, request: OpenRequest, error: RequestError, now: float) -> list[Outgoing]:
        """End a request for the client, and have the mesh stop it."""
        if request.cancelled_at is not None:
            self._close(request, End(Outcome.CANCELLED))
            return []
        self._close(request, End(Outcome.FAILED, error=ErrorInfo.of(error)))
        return self._cancel(request, now)

    def _settle(self, request: OpenRequest, end: End) -> None:
        """The mesh is through with a request: so are we."""
        self._close(request, end)
        del self._requests[request.stream.request_id]

    def _close(self, request: OpenRequest, end: End) -> None:
        if request.stream.close(end):
            self.num_ended[end.outcome] += 1
            _record(request, end)


def _end_of(request: OpenRequest, closed: RequestClosed) -> End:
    """What the end that the mesh reports is for the client."""
    outcome, error = closed.outcome, closed.error
    if outcome is Outcome.COMPLETED and any(choice.finish_reason is None for choice in request.stream.choices):
        outcome, error = Outcome.FAILED, ErrorInfo.of(_incomplete())
    elif outcome is Outcome.CANCELLED and request.cancelled_at is None:
        outcome, error = Outcome.FAILED, ErrorInfo.of(_unavailable("The mesh stopped this request."))
    elif outcome is Outcome.FAILED and error is None:
        error = ErrorInfo.of(RequestError("The mesh failed this request and did not say why."))
    return End(outcome, closed.usage, closed.timing, error)


def _incomplete() -> Unavailable:
    return _unavailable("A part of the output was lost between two services.")


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, retry_after_s=_RETRY_AFTER_S)


def _record(request: OpenRequest, end: End) -> None:
    log.info(
        "request ended",
        extra={
            "request_id": request.stream.request_id,
            "tenant": request.tenant,
            "model": request.model,
            "outcome": str(end.outcome),
            "num_prompt_tokens": end.usage.num_prompt_tokens if end.usage else None,
            "num_output_tokens": sum(end.usage.num_output_tokens) if end.usage else None,
            "total_s": round(end.timing.total_s, 4),
            "code": end.error.code if end.error else None,
        },
    )
