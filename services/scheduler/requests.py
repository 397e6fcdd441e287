"""The requests of this scheduler, from submission to the end of their retention: who may have one, and who hears of it.

Every message about a request comes here, and so does every event of the core. Answers are returned, to be sent; output
goes into the delivery. A request runs here in one attempt at a time: a later one takes the place of an earlier one
silently, and whoever speaks of an earlier one is not obeyed.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, assert_never

from msgspec.structs import replace

from services.scheduler.adoptions import Adoptions, Answers
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fleet import Fleet
from services.scheduler.deadlines import Deadlines
from services.scheduler.delivery import Delivery
from services.scheduler.intake import Intake, Memory
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.orphans import Orphans
from services.scheduler.pace import RETRY_AFTER_S
from services.scheduler.releases import Releases
from services.scheduler.retention import Retention
from services.scheduler.spans import SchedulerSpans
from services.scheduler.streams import AnyStream, EndedStream, Stream
from services.scheduler.usage import UsageRecords
from shared.errors import DeadlineExceeded, RequestError, Unavailable
from shared.ids import InstanceId, RequestId, Service
from shared.log import about
from shared.messages import (
    AdoptRequest,
    CancelRequest,
    ChoiceTokens,
    ErrorInfo,
    FindRequest,
    Message,
    Outcome,
    Presence,
    ReplayLog,
    ReplayRequest,
    RequestAccepted,
    RequestClosed,
    RequestOpened,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    StopStringFound,
    SubmitTokens,
    Usage,
)
from shared.presence import Directory

log = logging.getLogger(__name__)

RequestMessage = SubmitTokens | CancelRequest | ReplayRequest | FindRequest | AdoptRequest | ReplayLog | StopStringFound

_MAX_UNTOLD_S: Final = 60.0
"""How long the end of a request waits for a detokenizer that could tell its gateway."""
_RECORDED_WITHIN_S: Final = 60.0
"""A gateway has recorded what a request consumed so long after its end, unless the broker takes no records at all."""
_REPLAY_INTERVAL_S: Final = 0.5
"""All of a request is said again for the same gateway not more often than this."""


@dataclass(slots=True)
class Totals:
    """Counts since start."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    """On executors that are held no longer."""


class Requests:
    """All requests of one scheduler."""

    def __init__(
        self,
        scheduler_id: InstanceId,
        fleet: Fleet,
        directory: Directory,
        config: SchedulerConfig,
        usage: UsageRecords,
        spans: SchedulerSpans,
    ) -> None:
        """`usage` writes down what requests consumed that have no gateway to do it; `spans` follows those that are to
        be followed."""
        self.totals = Totals()
        self.metrics = SchedulerMetrics()
        self.is_draining = False
        """Whether new ones are refused."""
        self.retention = Retention(config.retain_s, config.retain_tokens)
        self.delivery = Delivery(scheduler_id, self.retention)
        self.orphans = Orphans(config.orphan_grace_s)
        self._scheduler_id = scheduler_id
        self._fleet = fleet
        self._directory = directory
        self._usage = usage
        self._spans = spans
        self._intake = Intake(fleet, config)
        self._deadlines = Deadlines()
        self._releases = Releases()
        self._adoptions = Adoptions(
            scheduler_id, self.delivery, self._deadlines, self._releases, self._detokenizers, self.metrics
        )
        self._ended = Memory()
        self._cancelled_early = Memory()

    # What gateways and detokenizers say.

    def handle(self, message: RequestMessage, now: float) -> Answers:
        """React to a message about a request; the messages to send."""
        match message:
            case SubmitTokens():
                return self._submit(message, now)
            case CancelRequest():
                return self._cancel(message, now)
            case ReplayRequest():
                return self._replay_for_gateway(message, now)
            case FindRequest():
                return self._adoptions.find(message)
            case AdoptRequest():
                return self._adoptions.adopt(message, now)
            case ReplayLog():
                self._replay_for_detokenizer(message)
            case StopStringFound():
                self._stop(message, now)
            case _:
                assert_never(message)
        return []

    def _submit(self, message: SubmitTokens, now: float) -> Answers:
        """Let a request in. What was let in before is only acknowledged; a later attempt of it begins anew."""
        stream = self.delivery.find(message.request_id)
        if stream is not None and stream.attempt > message.attempt:
            return self._adoptions.correct(stream, message.gateway_id)
        if not (stream is not None and stream.attempt == message.attempt) and not self._ended.has(
            message.request_id, message.attempt
        ):
            try:
                self._accept(message, now)
            except RequestError as error:  # an earlier attempt that is here stays: it may be all that there is
                self.metrics.refused(error.code)
                self._spans.refused(message, error)
                refusal = RequestRefused(message.request_id, ErrorInfo.of(error), message.attempt)
                return [(message.gateway_id, refusal)]
        num_tokens = len(message.prompt_token_ids)
        accepted = RequestAccepted(message.request_id, self._scheduler_id, num_tokens, message.attempt)
        return [(message.gateway_id, accepted)]

    def _stop(self, message: StopStringFound, now: float) -> None:
        """The text of a choice is complete. What was sampled after that is taken back, also if it has ended since."""
        stream = self.delivery.find(message.request_id)
        if stream is None or message.num_tokens < 1:
            return
        num_before = sum(stream.num_tokens())
        self.take(self._fleet.stop(message.request_id, message.index, message.num_tokens), now)
        stream = self.delivery.find(message.request_id) or stream
        stream.cut(message.index, message.num_tokens)
        self.metrics.num_cut_tokens += num_before - sum(stream.num_tokens())

    def _cancel(self, message: CancelRequest, now: float) -> Answers:
        """Stop a request. One that is still to come will be stopped then; one that goes on elsewhere just vanishes."""
        self.orphans.found(message.gateway_id)  # whoever writes is alive, and records the end of its requests
        stream = self.delivery.find(message.request_id)
        if stream is None:
            if not self._ended.has(message.request_id, message.attempt):
                self._cancelled_early.add(message.request_id, message.attempt)
        elif stream.attempt > message.attempt:
            return self._adoptions.correct(stream, message.gateway_id)
        elif message.goes_on:
            self._forget(stream)
        elif isinstance(stream, EndedStream):
            pass  # its end is on its way
        elif stream.closed is not None:
            self.delivery.drop(stream, now)
        else:
            self.take(self._end(stream, Outcome.CANCELLED), now)
        return []

    def _replay_for_gateway(self, message: ReplayRequest, now: float) -> Answers:
        """A gateway may have missed something: say all again if there is more than it has."""
        stream = self.delivery.find(message.request_id)
        if stream is None or stream.attempt < message.attempt:
            unknown = RequestUnknown(message.request_id, self._scheduler_id, message.attempt)
            return [(message.gateway_id, unknown)]
        if stream.attempt > message.attempt:
            return self._adoptions.correct(stream, message.gateway_id)
        has_more = any(here > there for here, there in zip(stream.num_tokens(), message.num_tokens, strict=False))
        if (has_more or stream.closed is not None) and now - stream.replayed_at >= _REPLAY_INTERVAL_S:
            self.metrics.replayed.add(1, "gateway")
            self.delivery.replay(stream, self._detokenizers(), now)
        return []

    def _replay_for_detokenizer(self, message: ReplayLog) -> None:
        """A detokenizer has missed something. One that does not have the request any more gets no answer."""
        stream = self.delivery.find(message.request_id)
        if stream is not None and stream.detokenizer_id == message.detokenizer_id:
            self.metrics.replayed.add(1, "detokenizer")
            self.delivery.repeat_log(stream)

    # What the core, time and others bring.

    def started(self, request_ids: Iterable[RequestId], now: float) -> None:
        """Requests have their first step."""
        for request_id in request_ids:
            stream = self.delivery.get(request_id)
            if stream is not None and stream.first_step_at is None:
                stream.first_step_at = now
                self.metrics.queue.record(now - stream.came_at, stream.opened.model)
                self._spans.started(stream)
                self._intake.started(stream.request, now)

    def take(self, events: Iterable[Event], now: float, *, is_late: bool = False) -> None:
        """Deliver what the core tells of. `is_late`: it ends a request whose time is over."""
        for event in events:
            if isinstance(event, ChoiceTokens):
                self.totals.num_output_tokens += len(event.token_ids)
                stream = self.delivery.get(event.request_id)
                if stream is not None and stream.first_token_at is None:
                    stream.first_token_at = now
                self.delivery.append(event)
            else:
                self._close(event, now, is_late=is_late)

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest request that has had no step has waited; 0 if there is none."""
        arrivals = (each.came_at for each in self.delivery if each.first_step_at is None and each.closed is None)
        return now - min(arrivals, default=now)

    def detokenizer_found(self, now: float) -> None:
        """A detokenizer takes work."""
        self.delivery.settle(self._detokenizers(), now)

    def detokenizer_lost(self, detokenizer_id: InstanceId, now: float) -> None:
        """A detokenizer is gone: others go on where it was."""
        self.delivery.move(detokenizer_id, self._detokenizers(), now)

    def gateway_lost(self, gateway_id: InstanceId, now: float) -> None:
        """A gateway is dead, or has left: its requests wait for another one. It may not have recorded the last ends."""
        self.orphans.lost(gateway_id, now)
        for stream in self.retention:
            if stream.opened.gateway_id == gateway_id and now - stream.ended_at < _RECORDED_WITHIN_S:
                self._usage.ended_alone(stream.closed, stream.submission, ago_s=now - stream.ended_at)

    def tick(self, now: float) -> Answers:
        """Time has passed; the messages to send."""
        for stream in self.orphans.to_give_up(self.delivery, now):
            if stream.closed is not None:
                self.delivery.drop(stream, now)
            else:
                self.take(self._end(stream, Outcome.CANCELLED), now)
        for request_id in self._deadlines.passed(now):
            late = self.delivery.get(request_id)
            assert late is not None, "a request that has a deadline has no stream"
            self.take(self._end(late, Outcome.FAILED, "the request's timeout_ms is over"), now, is_late=True)
        self.delivery.drop_untold(now - _MAX_UNTOLD_S, now)
        self.retention.expire(now)
        self._release_stranded()
        return [self._release_of(request_id, now) for request_id in self._releases.due(now)]

    def leave(self, now: float) -> None:
        """This scheduler leaves. Gateways give its requests to others; those that have no gateway end with it."""
        for stream in self.delivery:
            if stream.closed is None and self.orphans.has(stream.opened.gateway_id):
                closed = RequestClosed(stream.request_id, Outcome.CANCELLED, _usage_of(stream), stream.timing(now))
                self._usage.ended_alone(closed, stream.submission)

    # Steps of these.

    def _accept(self, message: SubmitTokens, now: float) -> None:
        if self.is_draining:
            raise Unavailable("this scheduler is shutting down", retry_after_s=RETRY_AFTER_S)
        detokenizers = self._directory.available(Service.DETOKENIZER, message.model)
        if not detokenizers:  # its text would go nowhere, while its tokens pile up here
            raise Unavailable(f"no detokenizer for {message.model} is there at the moment", retry_after_s=RETRY_AFTER_S)
        request = self._intake.admit(message, now)
        self.metrics.accepted(sum(len(choice.token_ids) for choice in message.resumed))
        earlier = self.delivery.find(message.request_id)
        if earlier is not None:
            self._forget(earlier)
        self._intake.queue(request)
        if message.timeout_ms is not None:
            self._deadlines.set(request.request_id, now + message.timeout_ms / 1000)
        opened = RequestOpened(
            request_id=request.request_id,
            scheduler_id=self._scheduler_id,
            gateway_id=message.gateway_id,
            model=message.model,
            text=message.text,
            num_choices=message.num_choices,
            attempt=message.attempt,
            trace=message.trace,
        )
        age_s = 0.0 if message.past is None else message.past.age_s
        stream = Stream(request, replace(message, resumed=()), opened, now - age_s, age_before_s=age_s)
        self.delivery.open(stream, detokenizers)
        self._spans.opened(stream)
        if request.is_finished:  # only its end had not been told
            self.take([RequestEnded(request, Outcome.COMPLETED)], now)
        if self._cancelled_early.has(request.request_id, message.attempt):
            self._cancelled_early.discard(request.request_id)
            self.take(self._fleet.cancel(request.request_id), now)

    def _end(self, stream: Stream, outcome: Outcome, reason: str | None = None) -> list[Event]:
        """End an open request, wherever it is; the events of that."""
        if stream.is_released:
            return [RequestEnded(stream.request, outcome, reason)]
        if reason is not None:
            return self._fleet.fail(stream.request_id, reason)
        return self._fleet.cancel(stream.request_id)

    def _close(self, event: RequestEnded, now: float, *, is_late: bool) -> None:
        request = event.request
        stream = self.delivery.get(request.request_id)
        assert stream is not None, "a request of the fleet has no stream"
        self._count(stream)
        self._deadlines.discard(request.request_id)
        self._releases.discard(request.request_id)
        error = None
        if event.outcome is Outcome.FAILED:
            reason = event.reason or "the request failed"
            error = ErrorInfo.of(DeadlineExceeded(reason) if is_late else RequestError(reason))
        closed = RequestClosed(
            request.request_id, event.outcome, _usage_of(stream), stream.timing(now), error, attempt=stream.attempt
        )
        self._spans.closed(stream, closed)
        self.delivery.close(closed, now)
        self.metrics.over(str(event.outcome), error.code if error else "")
        self._ended.add(request.request_id, stream.attempt)
        if self.orphans.has(stream.opened.gateway_id):
            self._usage.ended_alone(closed, stream.submission)

    def _forget(self, stream: AnyStream) -> None:
        """Stop an attempt without a word: it goes on as another one, here or elsewhere."""
        if isinstance(stream, Stream) and stream.closed is None:
            log.info("request goes on elsewhere", extra=about(stream.request_id, stream.submission.trace))
            self._count(stream)
            self.metrics.moved(sum(stream.num_tokens()))
            self._spans.given_up(stream)
            self._deadlines.discard(stream.request_id)
            self._releases.discard(stream.request_id)
            self._fleet.cancel(stream.request_id)
        self.delivery.forget(stream)

    def _release_stranded(self) -> None:
        """Release the requests that no executor here can go on with, if another scheduler has one. Those that have no
        gateway wait for one that adopts them."""
        for request in self._fleet.stranded():
            stream = self.delivery.get(request.request_id)
            assert stream is not None, "a request of the fleet has no stream"
            others = self._directory.available(Service.SCHEDULER, request.model)
            if self.orphans.has(stream.opened.gateway_id) or not any(
                beat.instance_id != self._scheduler_id for beat in others
            ):
                continue
            log.info("request released", extra=about(request.request_id, stream.submission.trace))
            self._fleet.cancel(request.request_id)
            self._releases.add(stream)

    def _release_of(self, request_id: RequestId, now: float) -> tuple[InstanceId, Message]:
        """What the gateway of a released request is told."""
        stream = self.delivery.get(request_id)
        assert stream is not None, "a released request has no stream"
        released = RequestReleased(request_id, self._scheduler_id, stream.attempt, stream.past(now))
        return stream.opened.gateway_id, released

    def _count(self, stream: Stream) -> None:
        """Count the prompt of a request that ends here, if it was computed here."""
        if stream.first_step_at is not None:
            self.totals.num_prompt_tokens += len(stream.request.prompt)
            self.totals.num_cached_tokens += stream.request.num_cached_tokens

    def _detokenizers(self) -> list[Presence]:
        return self._directory.available(Service.DETOKENIZER)


def _usage_of(stream: Stream) -> Usage:
    """What a request that ran here has consumed so far."""
    return Usage(len(stream.request.prompt), stream.num_cached_tokens, stream.num_tokens())
