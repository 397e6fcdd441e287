"""The gateway's open requests: sent until somebody takes them, followed until they end, cancelled until that is known.

A table without I/O: every event returns the messages to send. A request whose scheduler is lost, or has lost it, is
submitted to another one as its next attempt, with the output that is here; what was lost on its way is asked for again.
How requests end is `ends`' to say.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection

from services.gateway.attachments import resumed_elsewhere
from services.gateway.config import GatewayConfig
from services.gateway.ends import Ends, OnEnd, end_of, unavailable
from services.gateway.handover import TRY_AGAIN_AFTER_S, Handover
from services.gateway.open_request import OpenRequest
from services.gateway.spans import GatewaySpans
from services.gateway.streams import End, LogprobsLost, OutputGap, Stream
from services.gateway.submissions import Outgoing, cancellation
from shared.errors import RequestError, Unavailable
from shared.ids import InstanceId, RequestId
from shared.log import about
from shared.messages import (
    ChoiceText,
    ErrorInfo,
    Outcome,
    RequestAccepted,
    RequestAdopted,
    RequestClosed,
    RequestMoved,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    SubmitRequest,
    TextProduced,
)
from shared.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

_DEADLINE_GRACE_S = 1.0
"""A request's time runs at its scheduler, which says what it consumed. So much later it ends here in any case."""


class OpenRequests:
    """All open requests of this gateway, by id."""

    def __init__(
        self,
        gateway_id: InstanceId,
        config: GatewayConfig,
        handover: Handover,
        *,
        on_end: OnEnd = lambda _request, _end: None,
        on_first_token: Callable[[OpenRequest], None] = lambda _request: None,
        spans: GatewaySpans | None = None,
    ) -> None:
        """`handover` gives requests to schedulers; `on_end` is told of each request that ends for its client, also of
        one whose end another gateway may have told; `on_first_token` of each whose first token arrives."""
        self.num_orphans = 0
        """Messages about requests that are not open, or of earlier attempts."""
        self.num_repeated = 0
        """Submissions sent again because nobody answered."""
        self.num_questions = 0
        """How often schedulers were asked for what may be lost."""
        self.handover = handover
        self._gateway_id = gateway_id
        self._config = config
        self._on_first_token = on_first_token
        self._spans = spans or GatewaySpans(Tracing())
        self._requests: dict[RequestId, OpenRequest] = {}
        self._ends = Ends(gateway_id, config, self._requests, handover, spans=self._spans, on_end=on_end)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_ended(self) -> Counter[Outcome]:
        """Those that ended for their clients, since start."""
        return self._ends.num_ended

    @property
    def num_detached(self) -> int:
        """Those that nobody reads at the moment."""
        return sum(request.detached_until is not None for request in self._requests.values())

    def open(self, message: SubmitRequest, submission: Outgoing | None, now: float) -> Stream:
        """Follow a request that is being sent: the log that it will have. `submission` is what sends it; without one it
        waits for a scheduler."""
        stream = Stream(message.request_id, message.num_choices)
        scheduler_id = None if submission is None else message.scheduler_id
        request = OpenRequest(stream, message, scheduler_id, now, now, submission, sent_at=now)
        request.waits_since = now if submission is None else None
        self._add(request)
        return stream

    def submission(self, request_id: RequestId) -> list[Outgoing]:
        """What sends a request that was opened, if it is still wanted."""
        request = self._requests.get(request_id)
        return [request.submission] if request is not None and request.submission is not None else []

    # What the mesh says.

    def accepted(self, message: RequestAccepted, now: float) -> None:
        """A scheduler has taken a request."""
        request = self._find(message.request_id)
        if request is not None and (message.scheduler_id, message.attempt) == (request.scheduler_id, request.attempt):
            request.num_prompt_tokens = message.num_prompt_tokens
            self._accept(request, now)

    def refused(self, message: RequestRefused, now: float) -> list[Outgoing]:
        """An attempt was never started. Means nothing about one that was accepted: then it answers a repetition."""
        request = self._find(message.request_id)
        if request is None or request.is_taken or message.attempt != request.attempt:
            return []
        if request.cancelled_at is not None:
            self._ends.settle(request, End(Outcome.CANCELLED))
            return []
        if message.error.status == Unavailable.status:
            request.refusal = message.error
            outgoing = self._hand_over(request, self.handover.redirect, now)
            if outgoing is not None:
                self._spans.retried(request, "refused")
                return outgoing
        self._ends.settle(request, End(Outcome.FAILED, error=message.error))
        return []

    def text_produced(self, message: TextProduced, now: float) -> list[Outgoing]:
        """Text and ends of any number of requests."""
        outgoing: list[Outgoing] = []
        for text in message.texts:
            if (request := self._find(text.request_id, text.attempt)) is not None:
                request.detokenizer_id, request.bereft_at = message.detokenizer_id, None
                outgoing += self._text(request, text, now)
        for closed in message.closed:
            if (request := self._find(closed.request_id, closed.attempt)) is not None:
                outgoing += self._closed(request, closed, now)
        return outgoing

    def unknown(self, message: RequestUnknown, now: float) -> list[Outgoing]:
        """A scheduler does not have what it was asked for: it has lost it, or never got it."""
        request = self._find(message.request_id)
        if request is None or (message.scheduler_id, message.attempt) != (request.scheduler_id, request.attempt):
            return []
        if request.cancelled_at is not None:
            self._ends.settle(request, End(Outcome.CANCELLED))
        elif request.is_taken:
            return self._lose(request, now, "scheduler_lost_it")
        return []

    def released(self, message: RequestReleased, now: float) -> list[Outgoing]:
        """A scheduler cannot go on with what it has, and keeps it until another one has it."""
        request = self._requests.get(message.request_id)
        try:
            return self.handover.released(request, message, now)
        except Unavailable as error:
            assert request is not None, "only what is open here is handed over"
            return self._ends.abandon(request, error, now)

    def moved(self, message: RequestMoved) -> list[Outgoing]:
        """The client of a request has come back to another gateway, which follows it from now on."""
        request = self._find(message.request_id)
        if request is None or message.attempt <= request.attempt:
            return []
        del self._requests[message.request_id]
        self._spans.moved(request)
        if request.stream.close(End(Outcome.FAILED, error=ErrorInfo.of(resumed_elsewhere()))):
            log.info("request moved to another gateway", extra=about(message.request_id, request.spec.trace))
        if request.scheduler_id in (None, message.scheduler_id):
            return []
        return [request.dismissal(self._gateway_id)]  # submitted elsewhere before it was heard that it had moved

    def adopted(self, message: RequestAdopted, now: float) -> tuple[OpenRequest | None, list[Outgoing]]:
        """A scheduler has pointed a request to this gateway, which nobody reads here yet. None if it is of no use."""
        submission, scheduler_id = message.submission, message.scheduler_id
        request, attempt = self._requests.get(submission.request_id), submission.attempt
        if request is not None and attempt <= request.attempt:
            if (scheduler_id, attempt) == (request.scheduler_id, request.attempt):
                return request if request.cancelled_at is None else None, []
            here, request_id = self._gateway_id, request.request_id
            return None, [cancellation(scheduler_id, request_id, gateway_id=here, attempt=attempt, goes_on=True)]
        outgoing: list[Outgoing] = []
        if request is None:
            request = OpenRequest.adopted(message, now, self._config)
            self._add(request)
        elif request.scheduler_id not in (None, scheduler_id):  # it had an earlier attempt of it
            outgoing.append(request.dismissal(self._gateway_id))
        request.follow(message, now)
        self._accept(request, now)
        return request, outgoing

    def scheduler_lost(self, scheduler_id: InstanceId, now: float) -> list[Outgoing]:
        """A scheduler is gone, and with it what it held: others go on from what is here."""
        outgoing: list[Outgoing] = []
        for request in [each for each in self._requests.values() if each.scheduler_id == scheduler_id]:
            if request.cancelled_at is not None:
                self._ends.believe(request)
            else:
                outgoing += self._lose(request, now, "scheduler_lost")
        return outgoing

    def scheduler_found(self, scheduler_id: InstanceId, now: float) -> list[Outgoing]:
        """A scheduler is there, or has another model: it drops what goes on elsewhere, and gets what waits."""
        outgoing = self.handover.came_back(scheduler_id)
        for request in [each for each in self._requests.values() if each.scheduler_id is None]:
            outgoing += self._hand_over(request, self.handover.find_home, now) or []
        return outgoing

    def detokenizer_lost(self, detokenizer_id: InstanceId, models_without: Collection[str], now: float) -> None:
        """A detokenizer is gone: another goes on. `models_without` have none left."""
        for request in self._requests.values():
            if request.spec.model in models_without:
                request.bereft_at = now
            elif request.detokenizer_id == detokenizer_id:
                request.hurry(now + TRY_AGAIN_AFTER_S)

    def detokenizer_found(self, models: Collection[str]) -> None:
        """A detokenizer takes work for `models`."""
        for request in self._requests.values():
            if request.spec.model in models:
                request.bereft_at = None

    # What clients want, and what time brings.

    def cancel(self, stream: Stream, now: float) -> list[Outgoing]:
        """Stop a request; the mesh confirms with its end. Nothing happens to one that is cancelled or ended already."""
        request = self._of(stream)
        if request is None or request.cancelled_at is not None:
            return []
        return self._ends.cancel(request, now)

    def detach(self, stream: Stream, now: float) -> list[Outgoing]:
        """Nobody reads a request any more: cancel it, unless somebody comes back for it within a while."""
        request = self._of(stream)
        if request is None or request.cancelled_at is not None:
            return []
        if not self._config.resume_grace_s:
            return self._ends.cancel(request, now)
        request.detached_until = now + self._config.resume_grace_s
        return []

    def attach(self, stream: Stream) -> None:
        """Somebody reads a request."""
        if (request := self._of(stream)) is not None:
            request.detached_until = None

    def find(self, request_id: RequestId) -> OpenRequest | None:
        """A request that is open here, and wanted."""
        request = self._requests.get(request_id)
        return request if request is not None and request.cancelled_at is None else None

    def end_all(self, error: RequestError, now: float) -> list[Outgoing]:
        """Fail whatever is still open and cannot be resumed. The rest is let go: other gateways may take it over."""
        outgoing: list[Outgoing] = []
        for request in list(self._requests.values()):
            if request.is_resumable and request.cancelled_at is None:
                del self._requests[request.request_id]
            else:
                outgoing += self._ends.abandon(request, error, now)
        return outgoing

    def tick(self, now: float, *, is_connected: bool = True) -> list[Outgoing]:
        """Time has passed: repeat what nobody answered, fail what waited too long.

        Without the broker (`is_connected`) nobody can answer, which says nothing about them.
        """
        requests = list(self._requests.values())
        return [message for request in requests for message in self._check(request, now, is_connected)]

    def _add(self, request: OpenRequest) -> None:
        if (timeout_ms := request.spec.timeout_ms) is not None:
            request.deadline = request.opened_at + timeout_ms / 1000 + _DEADLINE_GRACE_S
        self._requests[request.request_id] = request

    def _find(self, request_id: RequestId, attempt: int | None = None) -> OpenRequest | None:
        """An open request, unless what was said of it is from an earlier attempt."""
        request = self._requests.get(request_id)
        if request is None or (attempt is not None and attempt < request.attempt):
            self.num_orphans += 1
            return None
        return request

    def _of(self, stream: Stream) -> OpenRequest | None:
        """The request of a stream, unless the same one was let go and found again with another stream."""
        request = self._requests.get(stream.request_id)
        return request if request is not None and request.stream is stream else None

    def _accept(self, request: OpenRequest, now: float) -> None:
        request.submission, request.lost_at, request.waits_since, request.is_taken = None, None, None, True
        request.heard_at = now
        request.accepted_at = now if request.accepted_at is None else request.accepted_at
        request.went_on(now, self._config)
        request.stream.accept()
        self._spans.taken(request)

    def _text(self, request: OpenRequest, text: ChoiceText, now: float) -> list[Outgoing]:
        if not 0 <= text.index < len(request.stream.choices):
            return self._ends.abandon(request, unavailable("A service sent a choice that was not asked for."), now)
        if request.attempt == 1 and request.submission is not None:  # its acceptance is late, or lost
            self._accept(request, now)
        request.heard_at = now
        choice = request.stream.choices[text.index]
        num_before = len(choice.token_ids)
        try:
            request.stream.append(text)
        except OutputGap:
            request.hurry(now)
        except LogprobsLost:
            return self._ends.abandon(request, unavailable("The log-probabilities of this request were lost."), now)
        if len(choice.token_ids) > num_before:
            if request.first_token_at is None:
                request.first_token_at = now
                self._on_first_token(request)
            request.num_losses = 0
            request.went_on(now, self._config)
            request.produced(now)
        return []

    def _closed(self, request: OpenRequest, closed: RequestClosed, now: float) -> list[Outgoing]:
        if request.is_cut_short(closed):
            request.hurry(now)
            return []
        self._ends.settle(request, end_of(request, closed))
        return []

    def _lose(self, request: OpenRequest, now: float, reason: str) -> list[Outgoing]:
        outgoing = self._hand_over(request, self.handover.lose, now) or []
        self._spans.retried(request, reason)
        return outgoing

    def _hand_over(
        self, request: OpenRequest, how: Callable[[OpenRequest, float], list[Outgoing] | None], now: float
    ) -> list[Outgoing] | None:
        try:
            return how(request, now)
        except Unavailable as error:
            return self._ends.abandon(request, error, now)

    # Time.

    def _check(self, request: OpenRequest, now: float, is_connected: bool) -> list[Outgoing]:
        if request.cancelled_at is not None:
            return self._ends.press(request, now)
        if (error := request.overdue(now, self._config, is_connected=is_connected)) is not None:
            return self._ends.abandon(request, error, now)
        if request.detached_until is not None and now >= request.detached_until:
            return self._ends.cancel(request, now)
        if not is_connected:
            return []
        if request.scheduler_id is None:
            return self._hand_over(request, self.handover.find_home, now) or []
        if request.submission is not None:
            repeated = request.repetition(now, self._config)
            self.num_repeated += len(repeated)
            return repeated
        if now < request.ask_at:
            return []
        self.num_questions += 1
        return [request.question(self._gateway_id, now)]
