"""The scheduler as an actor: decode a message, call the core, send what it returned. Decides nothing about batches.

Acts when its mailbox is empty, so that everything that arrived together is in one plan and one delivery.
"""

import logging
from dataclasses import dataclass
from typing import Final, assert_never

from services.scheduler.attachments import Attachments
from services.scheduler.config import SchedulerConfig, parse_weights
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.deadlines import Deadlines
from services.scheduler.delivery import Delivery, Stream
from services.scheduler.intake import Intake, Memory
from services.scheduler.pace import RETRY_AFTER_S
from services.scheduler.pinning import PinReader, PinsRead, follow_pins
from services.scheduler.recording.recorded_fleet import RecordedFleet
from services.scheduler.recording.recording import Recording
from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.errors import DeadlineExceeded, RequestError, Unavailable
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    AttachRefused,
    CancelRequest,
    ChoiceTokens,
    DetachExecutor,
    ErrorInfo,
    ExecutorAttached,
    ExecutorCapacity,
    ExecutorStatus,
    ExecutorView,
    Outcome,
    PinsChanged,
    Presence,
    RequestAccepted,
    RequestClosed,
    RequestOpened,
    RequestRefused,
    SchedulerInbound,
    SchedulerStatus,
    StepCompleted,
    StepsMissing,
    StopStringFound,
    SubmitTokens,
    Usage,
)
from shared.presence import Directory
from shared.transport import Transport

log = logging.getLogger(__name__)

_MAX_UNTOLD_S: Final = 60.0
"""How long the end of a request waits for a detokenizer that could tell its gateway."""


@dataclass(slots=True)
class _Totals:
    """Counts since start."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    """On executors that are held no longer."""


class SchedulerService(Actor[SchedulerInbound | PinsRead]):
    """Plans the steps of the executors that it holds."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        config: SchedulerConfig,
        recording: Recording | None = None,
    ) -> None:
        """`recording`, if there is one, gets every decision, and is closed at the end."""
        super().__init__(identity, transport, SchedulerInbound, clock)
        self._config = config
        self._directory = Directory(clock)
        self._recording = recording
        self._fleet = self._make_fleet()
        self._intake = Intake(self._fleet, config)
        self._deadlines = Deadlines()
        self._attachments = Attachments(identity.instance_id)
        self._delivery = Delivery(identity.instance_id)
        self._ended = Memory()
        self._cancelled_early = Memory()
        self._totals = _Totals()
        self._pins = PinReader(transport, self.post)

    async def on_start(self) -> None:
        """Hear of all other instances, and of what is pinned."""
        await self.listen(subjects.PRESENCE)
        await self.listen(subjects.PINS)
        self._pins.start()

    async def on_stop(self) -> None:
        """Let other schedulers have the executors at once."""
        if self._recording is not None:
            self._recording.close()
        await self._pins.stop()
        for attachment in self._attachments:
            detach = DetachExecutor(self.identity.instance_id, attachment.epoch)
            await self.send_to(attachment.executor_id, detach)

    def is_idle(self) -> bool:
        """Whether every request has ended and been told of."""
        return self._delivery.is_empty

    def models(self) -> tuple[str, ...]:
        """Those of the executors held."""
        return self._fleet.models

    async def handle(self, message: SchedulerInbound | PinsRead | Tick) -> None:
        """React to one message."""
        match message:
            case StepCompleted():
                await self._on_step_completed(message)
            case SubmitTokens():
                await self._on_submit(message)
            case CancelRequest():
                self._on_cancel(message)
            case StopStringFound():
                self._take(self._fleet.stop(message.request_id, message.index, message.num_tokens))
            case Presence():
                await self._on_presence(message)
            case ExecutorAttached():
                self._on_attached(message)
            case AttachRefused():
                log.debug("executor is not free", extra={"executor": message.executor_id, "held_by": message.held_by})
            case StepsMissing():
                await self._on_steps_missing(message)
            case PinsChanged():
                self._pins.read_again()
            case PinsRead():
                follow_pins(self._fleet, message.pins, shares_prefixes=self._config.share_prefixes)
            case Tick():
                await self._on_tick()
            case _:
                assert_never(message)

    async def on_idle(self) -> None:
        """Plan for every executor that has room in its pipeline, then deliver what was produced."""
        now = self.clock.now()
        for attachment in self._attachments:
            while len(attachment.unanswered) < self._config.pipeline_depth:
                plan = self._fleet.schedule(attachment.executor_id)
                if plan is None:
                    break
                for assignment in plan.assigned:
                    stream = self._delivery.get(assignment.request_id)
                    if stream is not None and stream.first_step_at is None:
                        stream.first_step_at = now
                        self._intake.started(stream.request, now)
                await self.send_to(attachment.executor_id, attachment.sent(plan, now))
        for executor_id in self._fleet.drained_executors():
            await self._detach(executor_id)
        for detokenizer_id, message in self._delivery.flush(max_message_bytes=self.transport.max_payload):
            await self.send_to(detokenizer_id, message)

    def status(self) -> SchedulerStatus:
        """Queues and blocks of every executor, and counts."""
        schedulers = self._fleet.schedulers
        views = tuple(_view(executor_id, scheduler) for executor_id, scheduler in schedulers.items())
        return SchedulerStatus(
            executors=views,
            num_waiting=self._fleet.waiting().num_choices,
            num_running=sum(view.num_running for view in views),
            num_prompt_tokens=self._totals.num_prompt_tokens,
            num_cached_tokens=self._totals.num_cached_tokens,
            num_output_tokens=self._totals.num_output_tokens,
            num_preemptions=self._totals.num_preemptions + sum(s.num_preemptions for s in schedulers.values()),
        )

    # Requests.

    async def _on_submit(self, message: SubmitTokens) -> None:
        if message.request_id in self._ended:
            return
        if self._delivery.get(message.request_id) is None:
            try:
                self._accept(message)
            except RequestError as error:
                refusal = RequestRefused(message.request_id, ErrorInfo.of(error))
                await self.send_to(message.gateway_id, refusal)
                return
        accepted = RequestAccepted(message.request_id, self.identity.instance_id, len(message.prompt_token_ids))
        await self.send_to(message.gateway_id, accepted)

    def _accept(self, message: SubmitTokens) -> None:
        if self.is_draining:
            raise Unavailable("this scheduler is shutting down", retry_after_s=RETRY_AFTER_S)
        now = self.clock.now()
        detokenizers = self._directory.available(Service.DETOKENIZER, message.model)
        if not detokenizers:  # its text would go nowhere, while its tokens pile up here
            raise Unavailable(f"no detokenizer for {message.model} is there at the moment", retry_after_s=RETRY_AFTER_S)
        request = self._intake.admit(message, now)
        if message.timeout_ms is not None:
            self._deadlines.set(request.request_id, now + message.timeout_ms / 1000)
        opened = RequestOpened(
            request_id=request.request_id,
            scheduler_id=self.identity.instance_id,
            gateway_id=message.gateway_id,
            model=message.model,
            text=message.text,
            num_choices=message.num_choices,
        )
        self._delivery.open(Stream(request, opened, now), detokenizers)
        if request.request_id in self._cancelled_early:
            self._cancelled_early.discard(request.request_id)
            self._take(self._fleet.cancel(request.request_id))

    def _on_cancel(self, message: CancelRequest) -> None:
        stream = self._delivery.get(message.request_id)
        if stream is not None and stream.closed is not None:
            self._delivery.drop(stream)
        elif stream is not None:
            self._take(self._fleet.cancel(message.request_id))
        elif message.request_id not in self._ended:
            self._cancelled_early.add(message.request_id)

    def _take(self, events: list[Event], *, is_late: bool = False) -> None:
        """Deliver what the core tells of. `is_late`: it ends a request whose time is over."""
        now = self.clock.now()
        for event in events:
            if isinstance(event, ChoiceTokens):
                self._totals.num_output_tokens += len(event.token_ids)
                stream = self._delivery.get(event.request_id)
                if stream is not None and stream.first_token_at is None:
                    stream.first_token_at = now
                self._delivery.append(event)
            else:
                self._close(event, now, is_late=is_late)

    def _close(self, event: RequestEnded, now: float, *, is_late: bool) -> None:
        request = event.request
        stream = self._delivery.get(request.request_id)
        assert stream is not None, "a request of the fleet has no stream"
        if stream.first_step_at is not None:
            self._totals.num_prompt_tokens += len(request.prompt)
            self._totals.num_cached_tokens += request.num_cached_tokens
        self._deadlines.discard(request.request_id)
        error = None
        if event.outcome is Outcome.FAILED:
            reason = event.reason or "the request failed"
            error = ErrorInfo.of(DeadlineExceeded(reason) if is_late else RequestError(reason))
        usage = Usage(
            len(request.prompt), request.num_cached_tokens, tuple(len(choice.output) for choice in request.choices)
        )
        self._delivery.close(RequestClosed(request.request_id, event.outcome, usage, stream.timing(now), error), now)
        self._ended.add(request.request_id)

    # Executors.

    async def _on_step_completed(self, message: StepCompleted) -> None:
        attachment = self._attachments.of(message)
        if attachment is None:
            return  # of an epoch that is over
        if attachment.answered(message.result.step_id, self.clock.now()):
            self._take(self._fleet.apply(message.executor_id, message.result))

    async def _on_steps_missing(self, message: StepsMissing) -> None:
        attachment = self._attachments.get(message.executor_id)
        if attachment is not None and attachment.epoch == message.epoch:
            for plan in attachment.to_resend(message.next_step_id, self.clock.now()):
                await self.send_to(message.executor_id, plan)

    def _on_attached(self, message: ExecutorAttached) -> None:
        attachment = self._attachments.get(message.executor_id)
        if attachment is not None:
            if attachment.epoch == message.epoch:
                return
            self._lose_executor(message.executor_id, has_died=True)
        self._attachments.add(message)
        self._take(self._fleet.add_executor(message.executor_id, message.capacity))
        log.info("attached", extra={"executor": message.executor_id, "epoch": message.epoch})

    def _lose_executor(self, executor_id: InstanceId, *, has_died: bool) -> None:
        if self._attachments.get(executor_id) is None:
            return
        log.log(logging.WARNING if has_died else logging.INFO, "lost an executor", extra={"executor": executor_id})
        self._attachments.remove(executor_id)
        self._totals.num_preemptions += self._fleet.schedulers[executor_id].num_preemptions
        self._take(self._fleet.remove_executor(executor_id, has_died=has_died))

    async def _detach(self, executor_id: InstanceId) -> None:
        """Hold a draining executor no longer, now that it has nothing to do."""
        attachment = self._attachments.get(executor_id)
        if attachment is not None:
            await self.send_to(executor_id, DetachExecutor(self.identity.instance_id, attachment.epoch))
            self._lose_executor(executor_id, has_died=False)

    # Others come and go.

    async def _on_presence(self, beat: Presence) -> None:
        self._directory.observe(beat)
        if beat.is_leaving:
            self._on_lost(beat, has_died=False)
        elif beat.service is Service.EXECUTOR:
            await self._on_executor_beat(beat)
        elif beat.service is Service.DETOKENIZER:
            self._delivery.settle(self._directory.available(Service.DETOKENIZER))

    async def _on_executor_beat(self, beat: Presence) -> None:
        if self._attachments.is_lost(beat):
            self._lose_executor(beat.instance_id, has_died=True)
        if self._attachments.get(beat.instance_id) is not None:
            if beat.is_draining:
                self._take(self._fleet.drain_executor(beat.instance_id))
            return
        if beat.is_draining or self.is_draining:
            return
        assert isinstance(beat.status, ExecutorStatus)
        holder = beat.status.held_by
        if holder in (None, self.identity.instance_id) or self._directory.get(holder) is None:
            await self.send_to(beat.instance_id, AttachExecutor(self.identity.instance_id))

    def _on_lost(self, beat: Presence, *, has_died: bool) -> None:
        match beat.service:
            case Service.EXECUTOR:
                self._lose_executor(beat.instance_id, has_died=has_died)
            case Service.DETOKENIZER:
                self._delivery.move(beat.instance_id, self._directory.available(Service.DETOKENIZER))
            case Service.GATEWAY:
                for stream in self._delivery.of_gateway(beat.instance_id):
                    if stream.closed is None:
                        self._take(self._fleet.cancel(stream.request.request_id))
                    else:
                        self._delivery.drop(stream)
            case Service.TOKENIZER | Service.SCHEDULER:
                pass

    async def _on_tick(self) -> None:
        for beat in self._directory.expire():
            log.warning("an instance is silent", extra={"lost": beat.instance_id})
            self._on_lost(beat, has_died=True)
        now = self.clock.now()
        for request_id in self._deadlines.passed(now):
            self._take(self._fleet.fail(request_id, "the request's timeout_ms is over"), is_late=True)
        self._delivery.drop_untold(now - _MAX_UNTOLD_S)
        for attachment in self._attachments:
            if attachment.unanswered and now - attachment.waiting_since > self._config.resend_after_s:
                for plan in attachment.to_resend(0, now):
                    await self.send_to(attachment.executor_id, plan)

    def _make_fleet(self) -> Fleet:
        weights = parse_weights(self._config.tenant_weights)
        if self._recording is not None:
            return RecordedFleet(self._settings_for, weights, self._recording)
        return Fleet(lambda capacity, shares: self._settings_for(capacity).make_scheduler(capacity, shares), weights)

    def _settings_for(self, capacity: ExecutorCapacity) -> SchedulerSettings:
        return self._config.settings_for(capacity, max_plan_bytes=self.transport.max_payload)


def _view(executor_id: InstanceId, scheduler: Scheduler) -> ExecutorView:
    free = scheduler.blocks.num_free_blocks
    return ExecutorView(
        executor_id=executor_id,
        model=scheduler.capacity.model,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_blocks=scheduler.capacity.num_blocks,
        num_free_blocks=free,
        num_cached_blocks=scheduler.blocks.num_cached_blocks,
        num_pinned_blocks=scheduler.pins.num_blocks,
        num_evicted_blocks=scheduler.blocks.num_evictions,
        eviction_age_s=scheduler.blocks.eviction_age_s,
    )
