"""The requests that are being decoded: opened, taken forward and closed by a scheduler's messages.

Every request opened here ends with exactly one `RequestClosed` to its gateway, unless its scheduler is gone, or has
given it to another detokenizer while this one could not be heard: then somebody else ends it. A request that cannot go
on (too many are open, its tokens cannot be decoded) fails by itself: its gateway is told why, its scheduler to stop.

Where entries are missing, or belong to a request that is not known here, their scheduler is asked for the whole log
(`gaps`). So forgetting a request costs a repetition and loses nothing.

Does not own when messages are sent.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from services.detokenizer.choice import Choice, LogGap
from services.detokenizer.gaps import Gaps
from services.detokenizer.generations import Generation, Generations
from services.detokenizer.incremental import Decoding, decoder_after
from services.detokenizer.logprobs import LogprobTexts
from services.detokenizer.outbox import Outbox
from services.detokenizer.spans import DetokenizerSpans
from services.detokenizer.stop_strings import StopScanner, stop_strings
from shared.errors import ModelNotFound, RequestError, Unavailable
from shared.ids import InstanceId, RequestId
from shared.log import about
from shared.messages import (
    CancelRequest,
    ChoiceTokens,
    DecodeTokens,
    ErrorInfo,
    Outcome,
    RequestClosed,
    RequestOpened,
    StopStringFound,
    Usage,
)
from shared.presence import DEAD_AFTER_S
from shared.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

_MAX_PART_TOKENS = 256
"""With 20 alternatives for each, about half a megabyte of text event."""


@dataclass(slots=True)
class _OpenRequest:
    opened: RequestOpened
    choices: tuple[Choice, ...]
    opened_at: float
    heard_at: float
    """When something last arrived for it."""

    @property
    def generation(self) -> Generation:
        """Which telling of the request this is."""
        return self.opened.attempt, self.opened.replay


class OpenRequests:
    """Takes a scheduler's messages and puts what follows from them into an outbox."""

    def __init__(
        self,
        decoding: Decoding,
        outbox: Outbox,
        *,
        model: str,
        max_open_choices: int,
        max_silence_s: float,
        spans: DetokenizerSpans | None = None,
    ) -> None:
        """A request of which nothing is heard for `max_silence_s` is forgotten until something is."""
        self._decoding = decoding
        self._outbox = outbox
        self._model = model
        self._max_open_choices = max_open_choices
        self._max_silence_s = max_silence_s
        self._spans = spans or DetokenizerSpans(Tracing())
        self._requests: dict[RequestId, _OpenRequest] = {}
        self._texts = LogprobTexts(decoding)
        self.gaps = Gaps(outbox, outbox.sender_id)
        self._ended = Generations()
        self.num_open_choices = 0
        self.num_tokens = 0
        """Entries of logs taken in since start."""
        self.num_unknown = 0
        """Entries and ends of requests that were not known here, and have not just ended, since start."""
        self.num_ended: Counter[str] = Counter()
        """Requests told to an end, by that end."""
        self.num_forgotten = 0
        """Requests dropped because they were quiet, or their scheduler was gone."""
        self.num_stop_strings = 0

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._requests)

    def take(self, message: DecodeTokens, now: float) -> None:
        """Go on with everything that one step produced; `now` is the clock's time in seconds."""
        for opened in message.opened:
            self._open(opened, now)
        for entry in message.tokens:
            if (request := self._find(message.scheduler_id, entry.request_id, now)) is not None:
                request.heard_at = now
                self._decode(request, entry, now)
        for closed in message.closed:
            if (request := self._find(message.scheduler_id, closed.request_id, now)) is not None:
                self._close(request, closed, now)

    def tick(self, now: float) -> None:
        """Time has passed: ask again for what is still missing."""
        self.gaps.tick(now)

    def drop_stale(self, is_alive: Callable[[InstanceId], bool], now: float) -> int:
        """Forget the requests that nobody will end here, and return how many.

        A scheduler has `DEAD_AFTER_S` from the opening of a request to be heard of at all. A gateway that is gone
        makes no difference: its client may come back to another one.
        """
        stale = [
            request_id
            for request_id, request in self._requests.items()
            if now - request.heard_at > self._max_silence_s
            or (now - request.opened_at > DEAD_AFTER_S and not is_alive(request.opened.scheduler_id))
        ]
        for request_id in stale:
            self._forget(request_id, "forgotten")
        self.num_forgotten += len(stale)
        return len(stale)

    def _open(self, opened: RequestOpened, now: float) -> None:
        generation = (opened.attempt, opened.replay)
        before = self._requests.get(opened.request_id)
        latest = self._ended.get(opened.request_id) if before is None else before.generation
        if latest is not None and generation <= latest:
            if opened.attempt < latest[0]:  # the scheduler does not know that another one goes on
                self._cancel(opened)
            return
        if before is not None:
            self._forget(opened.request_id, "said_again")
        self._spans.opened(opened)
        try:
            request = _OpenRequest(opened, self._new_choices(opened), now, now)
        except RequestError as error:
            self._ended.add(opened.request_id, generation)
            self._spans.ended(opened.request_id, 0, Outcome.FAILED, error.code)
            self._fail(opened, (0,) * opened.num_choices, error)
            self._cancel(opened)
            return
        self._requests[opened.request_id] = request
        self.num_open_choices += len(request.choices)

    def _new_choices(self, opened: RequestOpened) -> tuple[Choice, ...]:
        if opened.model != self._model:
            raise ModelNotFound(f"this detokenizer serves {self._model}, not {opened.model}")
        if self.num_open_choices + opened.num_choices > self._max_open_choices:
            raise Unavailable(
                f"the detokenizer decodes {self.num_open_choices} choices of at most {self._max_open_choices}",
                retry_after_s=1.0,
            )
        return tuple(self._new_choice(opened, index) for index in range(opened.num_choices))

    def _new_choice(self, opened: RequestOpened, index: int) -> Choice:
        text = opened.text
        decoder = decoder_after(self._decoding, text.context_token_ids, skip_special_tokens=text.skip_special_tokens)
        scanner = StopScanner(stop_strings(text.stop)) if text.stop else None
        return Choice(opened.request_id, index, decoder, scanner, self._texts, attempt=opened.attempt)

    def _decode(self, request: _OpenRequest, entry: ChoiceTokens, now: float) -> None:
        try:
            if not 0 <= entry.index < len(request.choices):
                raise RequestError(f"the request has no choice {entry.index}")
            for part in _parts(entry):
                self._decode_part(request, part)
        except LogGap:
            self.gaps.found(request.opened.scheduler_id, entry.request_id, entry.index, now)
        except RequestError as error:
            self._fail_open(request, error)
            self._cancel(request.opened)

    def _decode_part(self, request: _OpenRequest, entry: ChoiceTokens) -> None:
        choice = request.choices[entry.index]
        num_before, was_stopped = choice.num_tokens, choice.is_stopped
        event = choice.take(entry)
        if choice.num_tokens > num_before:
            self.num_tokens += choice.num_tokens - num_before
            self.gaps.filled(entry.request_id, entry.index)
        if event is not None:
            self._outbox.add_event(request.opened.gateway_id, event)
        if choice.is_stopped and not was_stopped:
            self.num_stop_strings += 1
            found = StopStringFound(entry.request_id, entry.index, choice.num_tokens)
            self._outbox.add_message(request.opened.scheduler_id, found)

    def _close(self, request: _OpenRequest, closed: RequestClosed, now: float) -> None:
        try:
            event = self._closed(request, closed)
        except LogGap:
            self.gaps.found(request.opened.scheduler_id, closed.request_id, None, now)
        except RequestError as error:
            self._fail_open(request, error)
        else:
            self._outbox.add_event(request.opened.gateway_id, event)
            self.num_ended[str(event.outcome)] += 1
            self._end(request, closed.outcome)

    def _closed(self, request: _OpenRequest, closed: RequestClosed) -> RequestClosed:
        """The end as the gateway must learn it: after all text, with the counts that the stop strings made.

        Raises LogGap if entries before it are missing.
        """
        counts = list(closed.usage.num_output_tokens)
        if len(counts) != len(request.choices):
            raise RequestError(f"{len(request.choices)} choices ended with counts for {len(counts)}")
        if any(
            not choice.is_stopped and choice.num_tokens < count
            for choice, count in zip(request.choices, counts, strict=True)
        ):
            raise LogGap
        if closed.outcome is Outcome.COMPLETED and not all(c.is_finished or c.is_stopped for c in request.choices):
            raise LogGap
        for index, choice in enumerate(request.choices):
            if (event := choice.close()) is not None:
                self._outbox.add_event(request.opened.gateway_id, event)
            if choice.is_stopped:
                counts[index] = choice.num_tokens
        usage = msgspec.structs.replace(closed.usage, num_output_tokens=tuple(counts))
        return msgspec.structs.replace(closed, usage=usage)

    def _find(self, scheduler_id: InstanceId, request_id: RequestId, now: float) -> _OpenRequest | None:
        """An open request of this scheduler. For any other, the scheduler is asked what it is; unless it just ended."""
        request = self._requests.get(request_id)
        if request is not None and request.opened.scheduler_id == scheduler_id:
            return request
        if request is not None or self._ended.get(request_id) is None:
            self.num_unknown += 1
            self.gaps.unknown(scheduler_id, request_id, now)
        return None

    def _fail_open(self, request: _OpenRequest, error: RequestError) -> None:
        self._end(request, Outcome.FAILED, error.code)
        self._fail(request.opened, tuple(choice.num_tokens for choice in request.choices), error)

    def _fail(self, opened: RequestOpened, counts: tuple[int, ...], error: RequestError) -> None:
        self.num_ended[str(Outcome.FAILED)] += 1
        log.warning("request failed", extra=about(opened.request_id, opened.trace) | {"error": error.message})
        failed = RequestClosed(
            opened.request_id, Outcome.FAILED, Usage(0, 0, counts), error=ErrorInfo.of(error), attempt=opened.attempt
        )
        self._outbox.add_event(opened.gateway_id, failed)

    def _cancel(self, opened: RequestOpened) -> None:
        message = CancelRequest(opened.request_id, opened.gateway_id, opened.attempt)
        self._outbox.add_message(opened.scheduler_id, message)

    def _end(self, request: _OpenRequest, outcome: Outcome, error_code: str | None = None) -> None:
        self._ended.add(request.opened.request_id, request.generation)
        self._forget(request.opened.request_id, outcome, error_code)

    def _forget(self, request_id: RequestId, outcome: str, error_code: str | None = None) -> None:
        request = self._requests.pop(request_id)
        self._spans.ended(request_id, sum(choice.num_tokens for choice in request.choices), outcome, error_code)
        self.num_open_choices -= len(request.choices)
        self.gaps.forget(request_id)


def _parts(entry: ChoiceTokens) -> Iterable[ChoiceTokens]:
    """An entry, or if it is long, as after the loss of another detokenizer, several: one message must carry each."""
    num_tokens = len(entry.token_ids)
    if num_tokens <= _MAX_PART_TOKENS:
        return (entry,)
    return [
        msgspec.structs.replace(
            entry,
            offset=entry.offset + start,
            token_ids=entry.token_ids[start : start + _MAX_PART_TOKENS],
            finish_reason=entry.finish_reason if start + _MAX_PART_TOKENS >= num_tokens else None,
            logprobs=entry.logprobs[start : start + _MAX_PART_TOKENS],
        )
        for start in range(0, num_tokens, _MAX_PART_TOKENS)
    ]
