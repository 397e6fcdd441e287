"""The scheduler as an actor: decode a message, call the core, send what it returned. Decides nothing about batches.

Acts when its mailbox is empty, so that everything that arrived together is in one plan and one delivery.
"""

import logging
import math
from collections.abc import Sequence
from typing import Final, assert_never

from services.scheduler.adoptions import Answers
from services.scheduler.attachments import Attachment, Attachments
from services.scheduler.config import SchedulerConfig, parse_weights
from services.scheduler.core.events import Event
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.instruments import scheduler_instruments
from services.scheduler.pinning import PinReader, PinsRead, follow_pins
from services.scheduler.recording.recorded_fleet import RecordedFleet
from services.scheduler.recording.recording import Recording
from services.scheduler.requests import Requests
from services.scheduler.spans import SchedulerSpans
from services.scheduler.usage import UsageRecords
from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.ids import InstanceId, Service
from shared.messages import (
    AdoptRequest,
    AttachExecutor,
    AttachRefused,
    CancelRequest,
    DetachExecutor,
    ExecutorAttached,
    ExecutorCapacity,
    ExecutorStatus,
    ExecutorView,
    FindRequest,
    PinsChanged,
    Presence,
    ReplayLog,
    ReplayRequest,
    SchedulerInbound,
    SchedulerStatus,
    StepCompleted,
    StepsMissing,
    StopStringFound,
    SubmitTokens,
)
from shared.presence import Directory
from shared.telemetry.metrics import Instrument
from shared.telemetry.tracing import Tracing
from shared.transport import Transport
from shared.usage import UsageOutbox

log = logging.getLogger(__name__)

_HURRY_S: Final = 2.0
"""After the broker's return, for how long results are missed sooner than usual."""
_HURRIED_RESEND_AFTER_S: Final = 0.3


class SchedulerService(Actor[SchedulerInbound | PinsRead]):
    """Plans the steps of the executors that it holds."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        config: SchedulerConfig,
        recording: Recording | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`recording`, if there is one, gets every decision, and is closed at the end."""
        super().__init__(identity, transport, SchedulerInbound, clock)
        self._config = config
        self._directory = Directory(clock)
        self._recording = recording
        self._fleet = self._make_fleet()
        self._usage = UsageOutbox(transport)
        records = UsageRecords(identity.instance_id, self._usage.add)
        self._spans = SchedulerSpans(tracing or Tracing(), self._fleet, clock)
        self._requests = Requests(identity.instance_id, self._fleet, self._directory, config, records, self._spans)
        self._metrics = self._requests.metrics
        self._attachments = Attachments(identity.instance_id)
        self._pins = PinReader(transport, self.post)
        self._hurries_until = -math.inf
        transport.on_reconnect(self._hurry)

    async def on_start(self) -> None:
        """Hear of all other instances, of requests that gateways look for, and of what is pinned."""
        await self.listen(subjects.PRESENCE)
        await self.listen(subjects.ADOPTIONS)
        await self.listen(subjects.PINS)
        self._pins.start()
        self._usage.start()

    async def on_stop(self) -> None:
        """Let other schedulers have the executors at once, and hand over what usage has not been recorded yet."""
        if self._recording is not None:
            self._recording.close()
        await self._pins.stop()
        for attachment in self._attachments:
            detach = DetachExecutor(self.identity.instance_id, attachment.epoch)
            await self.send_to(attachment.executor_id, detach)
        self._requests.leave(self.clock.now())
        self._spans.leave()
        await self._usage.stop()

    def is_idle(self) -> bool:
        """Whether every request has ended and been told of."""
        return self._requests.delivery.is_empty

    def drain(self, deadline_s: float) -> None:
        """Take nothing new. What runs goes on at another scheduler, if there is one, or else here until the deadline;
        what is left then, gateways give to whoever comes."""
        self._requests.is_draining = True
        super().drain(deadline_s)
        self.post(Tick())  # executors are let go now, not a moment later

    def models(self) -> tuple[str, ...]:
        """Those of the executors held, but for executors that take nothing new."""
        return self._fleet.models

    async def handle(self, message: SchedulerInbound | PinsRead | Tick) -> None:
        """React to one message."""
        match message:
            case StepCompleted():
                await self._on_step_completed(message)
            case (
                SubmitTokens()
                | CancelRequest()
                | ReplayRequest()
                | FindRequest()
                | AdoptRequest()
                | ReplayLog()
                | StopStringFound()
            ):
                await self._answer(self._requests.handle(message, self.clock.now()))
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
                began = self.clock.now()
                plan = self._fleet.schedule(attachment.executor_id)
                if plan is None:
                    break
                self._metrics.plan.record(self.clock.now() - began)
                plan = self._spans.planned(attachment.executor_id, plan)
                self._requests.started((assignment.request_id for assignment in plan.assigned), now)
                await self.send_to(attachment.executor_id, attachment.sent(plan, now))
        for executor_id in self._fleet.drained_executors():
            await self._detach(executor_id)
        for detokenizer_id, message in self._requests.delivery.flush(max_message_bytes=self.transport.max_payload):
            await self.send_to(detokenizer_id, message)

    def status(self) -> SchedulerStatus:
        """Queues and blocks of every executor, and counts."""
        schedulers, totals = self._fleet.schedulers, self._requests.totals
        views = tuple(_view(executor_id, scheduler) for executor_id, scheduler in schedulers.items())
        return SchedulerStatus(
            executors=views,
            num_waiting=self._fleet.waiting().num_choices,
            num_running=sum(view.num_running for view in views),
            num_prompt_tokens=totals.num_prompt_tokens,
            num_cached_tokens=totals.num_cached_tokens,
            num_output_tokens=totals.num_output_tokens,
            num_preemptions=totals.num_preemptions + sum(s.num_preemptions for s in schedulers.values()),
            num_open_requests=self._requests.delivery.num_streams,
            num_orphaned_requests=self._requests.orphans.num_streams,
            num_retained_requests=len(self._requests.retention),
            num_unrecorded=self._usage.num_unrecorded,
        )

    def instruments(self) -> Sequence[Instrument]:
        """Requests, tokens, plans, and each executor's queue and blocks."""
        return scheduler_instruments(
            self._requests, self._fleet, self._attachments, self._directory, self.status, self.clock
        )

    async def _answer(self, answers: Answers) -> None:
        for instance_id, answer in answers:
            await self.send_to(instance_id, answer)

    def _take(self, events: list[Event]) -> None:
        self._requests.take(events, self.clock.now())

    # Executors.

    async def _on_step_completed(self, message: StepCompleted) -> None:
        attachment = self._attachments.of(message)
        if attachment is None:
            return  # of an epoch that is over
        began, num_before = self.clock.now(), self._requests.totals.num_output_tokens
        if attachment.answered(message.result.step_id, began):
            self._spans.completed(message.executor_id, message.result)
            self._take(self._fleet.apply(message.executor_id, message.result))
            num_sampled = len(message.result.token_ids) - len(message.result.failures)
            self._metrics.num_unused_tokens += num_sampled - (self._requests.totals.num_output_tokens - num_before)
            self._metrics.apply.record(self.clock.now() - began)

    async def _on_steps_missing(self, message: StepsMissing) -> None:
        attachment = self._attachments.get(message.executor_id)
        if attachment is not None and attachment.epoch == message.epoch:
            await self._resend(attachment, message.next_step_id)

    async def _resend(self, attachment: Attachment, from_step_id: int) -> None:
        for plan in attachment.to_resend(from_step_id, self.clock.now()):
            self._metrics.num_plans_resent += 1
            await self.send_to(attachment.executor_id, plan)

    def _on_attached(self, message: ExecutorAttached) -> None:
        attachment = self._attachments.get(message.executor_id)
        if attachment is not None:
            if attachment.epoch == message.epoch:
                return
            self._lose_executor(message.executor_id, has_died=True)
        self._attachments.add(message)
        self.announce()
        self._take(self._fleet.add_executor(message.executor_id, message.capacity))
        log.info("attached", extra={"executor": message.executor_id, "epoch": message.epoch})

    def _lose_executor(self, executor_id: InstanceId, *, has_died: bool) -> None:
        if self._attachments.get(executor_id) is None:
            return
        log.log(logging.WARNING if has_died else logging.INFO, "lost an executor", extra={"executor": executor_id})
        self._attachments.remove(executor_id)
        self._metrics.executors_lost.add(1, "died" if has_died else "left")
        self._spans.executor_lost(executor_id, "executor_lost" if has_died else "executor_let_go")
        self.announce()
        self._requests.totals.num_preemptions += self._fleet.schedulers[executor_id].num_preemptions
        self._take(self._fleet.remove_executor(executor_id, has_died=has_died))

    async def _detach(self, executor_id: InstanceId) -> None:
        """Hold an executor no longer, and tell it so."""
        attachment = self._attachments.get(executor_id)
        if attachment is not None:
            await self.send_to(executor_id, DetachExecutor(self.identity.instance_id, attachment.epoch))
            self._lose_executor(executor_id, has_died=False)

    # Others come and go.

    async def _on_presence(self, beat: Presence) -> None:
        is_news = self._directory.observe(beat)
        if beat.is_leaving:
            self._on_lost(beat, has_died=beat.has_died)
        elif beat.service is Service.EXECUTOR:
            await self._on_executor_beat(beat, is_news=is_news)
        elif beat.service is Service.DETOKENIZER:
            self._requests.detokenizer_found(self.clock.now())
        elif beat.service is Service.GATEWAY:
            self._requests.orphans.found(beat.instance_id)
        elif beat.service is Service.SCHEDULER and is_news:
            await self._answer(self._requests.tick(self.clock.now()))  # it may take what nobody here can go on with

    async def _on_executor_beat(self, beat: Presence, *, is_news: bool) -> None:
        if self._attachments.is_lost(beat):
            self._lose_executor(beat.instance_id, has_died=True)
        if self._attachments.get(beat.instance_id) is not None:
            if beat.is_draining:
                self._take(self._fleet.drain_executor(beat.instance_id))
                if is_news:
                    self.announce()
            return
        await self._ask_for(beat)

    async def _ask_for(self, beat: Presence) -> None:
        """Ask for an executor that is not held here, if it is free or its holder is gone."""
        if beat.is_draining or self.is_draining or self._attachments.get(beat.instance_id) is not None:
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
                self._requests.detokenizer_lost(beat.instance_id, self.clock.now())
            case Service.GATEWAY:
                self._requests.gateway_lost(beat.instance_id, self.clock.now())
            case Service.TOKENIZER | Service.SCHEDULER:
                pass

    async def _on_tick(self) -> None:
        now = self.clock.now()
        if self.transport.is_connected:  # without the broker nobody can be heard, which says nothing about them
            for beat in self._directory.expire():
                log.warning("an instance is silent", extra={"lost": beat.instance_id})
                self._on_lost(beat, has_died=True)
        if self.is_draining and self._is_another_scheduler_there():
            for attachment in self._attachments:  # it takes them over, and then the requests that wait for them
                await self._detach(attachment.executor_id)
        for beat in self._directory.available(Service.EXECUTOR):  # some may have lost their holder since
            await self._ask_for(beat)
        await self._answer(self._requests.tick(now))
        patience_s = self._config.resend_after_s
        if now < self._hurries_until:
            patience_s = min(patience_s, _HURRIED_RESEND_AFTER_S)
        for attachment in self._attachments:
            if attachment.unanswered and now - attachment.waiting_since > patience_s:
                await self._resend(attachment, 0)

    def _hurry(self) -> None:
        """The broker is back: plans and results may have gone with it, and executors are back in a moment."""
        self._hurries_until = self.clock.now() + _HURRY_S

    def _is_another_scheduler_there(self) -> bool:
        schedulers = self._directory.available(Service.SCHEDULER)
        return any(beat.instance_id != self.identity.instance_id for beat in schedulers)

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
