"""The executor as an actor: who holds it, which plans run, and what is answered.

A shell: the numbers come from `model_runner`, in the thread of `step_thread`. Owns the epoch, the order of plans, and
the results that may be asked for again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

from services.executor.metrics import ExecutorMetrics, executor_instruments
from services.executor.spans import StepSpans
from services.executor.step_thread import Runner, StepFinished, StepThread, StepThreadFailed
from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.clock import Clock
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    AttachRefused,
    DetachExecutor,
    ExecutorAttached,
    ExecutorInbound,
    ExecutorStatus,
    Presence,
    RunStep,
    StepCompleted,
    StepPlan,
    StepResult,
    StepsMissing,
)
from shared.presence import DEAD_AFTER_S, Directory
from shared.telemetry.metrics import Instrument
from shared.telemetry.tracing import Tracing
from shared.transport import Transport

log = logging.getLogger(__name__)

_MAX_WAITING_PLANS: Final = 32
"""More than any scheduler sends ahead; what comes on top is dropped, counted, and asked for later."""
_NUM_KEPT_RESULTS: Final = 64
"""More than can be on the way at once, so a plan that is sent again finds its result."""
_IDLE_AFTER_S: Final = 1.0
"""A scheduler with work sends a plan far more often than this."""


@dataclass(slots=True)
class Tenure:
    """The time that one scheduler holds this executor."""

    scheduler_id: InstanceId
    epoch: int
    last_heard: float
    """When it last asked or planned, by this process's clock."""
    next_step_id: int = 1
    num_waiting: int = 0
    """Plans taken whose results are not known yet."""
    results: OrderedDict[int, StepResult] = field(default_factory=OrderedDict)
    """The latest ones, by step id."""

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has been planned yet: slots and blocks are empty."""
        return self.next_step_id == 1

    def keep(self, result: StepResult) -> None:
        """Remember a result, and forget the oldest if there are many."""
        self.num_waiting -= 1
        self.results[result.step_id] = result
        if len(self.results) > _NUM_KEPT_RESULTS:
            self.results.popitem(last=False)


class Executor(Actor[ExecutorInbound | StepFinished | StepThreadFailed]):
    """One executor instance."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        clock: Clock,
        runner: Runner,
        *,
        nice: int = 0,
        kv_cache_bytes: int = 0,
        tracing: Tracing | None = None,
    ) -> None:
        """`kv_cache_bytes` is the size of the cache of `runner`, for metrics."""
        super().__init__(identity, transport, ExecutorInbound, clock)
        self._metrics = ExecutorMetrics()
        self._kv_cache_bytes = kv_cache_bytes
        self._runner = runner
        self._directory = Directory(clock)
        self._thread = StepThread(runner, self._report, nice=nice)
        self._spans = StepSpans(tracing or Tracing())
        self._tenure: Tenure | None = None
        self._last_epoch = 0
        self._num_steps = 0
        self._num_tokens = 0
        self._busy_s = 0.0
        self._num_guessed = 0
        self._num_guessed_right = 0

    async def on_start(self) -> None:
        """Listen to schedulers' beats, and start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self.listen(subjects.presence(Service.SCHEDULER))

    async def on_stop(self) -> None:
        """End the thread after the step that runs."""
        await asyncio.to_thread(self._thread.stop)

    async def handle(self, message: ExecutorInbound | StepFinished | StepThreadFailed | Tick) -> None:
        """React to one message."""
        match message:
            case AttachExecutor():
                await self._attach(message.scheduler_id)
            case DetachExecutor():
                self._detach(message)
            case RunStep():
                await self._run_step(message)
            case Presence():
                self._observe(message)
            case StepFinished():
                await self._step_finished(message)
            case StepThreadFailed():
                raise message.error
            case Tick():
                if self.transport.is_connected:  # without the broker nobody can be heard
                    self._directory.expire()
            case _:
                assert_never(message)

    def status(self) -> ExecutorStatus:
        """Who holds this executor, the latest epoch whether or not it is over, and what was done since the start."""
        return ExecutorStatus(
            held_by=self._tenure.scheduler_id if self._tenure else None,
            epoch=self._last_epoch,
            device=self._runner.device,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            busy_s=self._busy_s,
            num_guessed=self._num_guessed,
            num_guessed_right=self._num_guessed_right,
        )

    def instruments(self) -> Sequence[Instrument]:
        """Steps, tokens, guesses and capacity."""
        return executor_instruments(
            self._metrics,
            self.status,
            lambda: self._tenure.num_waiting if self._tenure else 0,
            self._runner.capacity,
            self._kv_cache_bytes,
        )

    def models(self) -> tuple[str, ...]:
        """The one model that this instance has loaded."""
        return (self._runner.capacity.model,)

    def is_idle(self) -> bool:
        """Whether nobody holds this executor, or its holder has planned nothing for a while."""
        tenure = self._tenure
        if tenure is None:
            return True
        return tenure.num_waiting == 0 and self.clock.now() - tenure.last_heard >= _IDLE_AFTER_S

    async def _attach(self, scheduler_id: InstanceId) -> None:
        """Grant, or say who is in the way.

        A holder that asks again before it planned anything did not hear the answer, and gets the same one. If it had
        planned, it has lost track, and starts anew in a new epoch. So `ExecutorAttached` always means: empty, step 1.
        """
        tenure = self._tenure
        if self.is_draining:
            await self.send_to(scheduler_id, AttachRefused(self.identity.instance_id, None))
            return
        if tenure is not None and tenure.scheduler_id != scheduler_id and self._is_alive(tenure):
            await self.send_to(scheduler_id, AttachRefused(self.identity.instance_id, tenure.scheduler_id))
            return
        if tenure is None or tenure.scheduler_id != scheduler_id or not tenure.is_fresh:
            tenure = self._grant(scheduler_id)
        tenure.last_heard = self.clock.now()
        await self.send_to(
            scheduler_id, ExecutorAttached(self.identity.instance_id, tenure.epoch, self._runner.capacity)
        )

    def _grant(self, scheduler_id: InstanceId) -> Tenure:
        self._last_epoch += 1
        self._tenure = Tenure(scheduler_id, self._last_epoch, self.clock.now())
        self._thread.reset(self._last_epoch)
        self._spans.reset()
        self.announce()
        log.info("held", extra={"scheduler": scheduler_id, "epoch": self._last_epoch})
        return self._tenure

    def _is_alive(self, tenure: Tenure) -> bool:
        """Whether the holder beats, or has been heard so lately that its first beat may still be on the way."""
        is_recent = self.clock.now() - tenure.last_heard < DEAD_AFTER_S
        return is_recent or self._directory.get(tenure.scheduler_id) is not None

    def _detach(self, message: DetachExecutor) -> None:
        if self._tenure and (message.scheduler_id, message.epoch) == (self._tenure.scheduler_id, self._tenure.epoch):
            self._free("detached")

    def _observe(self, beat: Presence) -> None:
        self._directory.observe(beat)
        if beat.is_leaving and self._tenure is not None and beat.instance_id == self._tenure.scheduler_id:
            self._free("its holder left")

    def _free(self, why: str) -> None:
        assert self._tenure is not None
        log.info("free", extra={"scheduler": self._tenure.scheduler_id, "epoch": self._tenure.epoch, "why": why})
        self._tenure = None
        self._thread.reset(0)
        self._spans.reset()
        self.announce()

    async def _run_step(self, message: RunStep) -> None:
        """Take the next plan; answer an old one again; ask for those before one that is too early."""
        tenure, step_id = self._tenure, message.plan.step_id
        if tenure is None or message.epoch != tenure.epoch:
            self.num_dropped_messages += 1
            return
        tenure.last_heard = self.clock.now()
        if step_id > tenure.next_step_id:
            missing = StepsMissing(self.identity.instance_id, tenure.epoch, tenure.next_step_id)
            await self.send_to(tenure.scheduler_id, missing)
        elif step_id == tenure.next_step_id:
            self._take(tenure, message.plan)
        elif (result := tenure.results.get(step_id)) is not None:
            await self._answer(tenure, result)
        elif step_id < tenure.next_step_id - tenure.num_waiting:
            self.num_dropped_messages += 1  # older than any result that is kept
        # Any other one waits or runs: its result is on the way.

    def _take(self, tenure: Tenure, plan: StepPlan) -> None:
        if tenure.num_waiting >= _MAX_WAITING_PLANS:
            self.num_dropped_messages += 1
            return
        tenure.next_step_id += 1
        tenure.num_waiting += 1
        self._spans.planned(tenure.epoch, plan)
        self._thread.submit(tenure.epoch, plan)

    async def _step_finished(self, message: StepFinished) -> None:
        self._metrics.step_took(message.num_rows, message.num_tokens, message.result)
        self._num_steps += 1
        self._num_tokens += message.num_tokens
        self._busy_s += message.result.duration_s
        self._num_guessed += sum(message.result.num_drafted)
        self._num_guessed_right += sum(message.result.num_tokens) - len(message.result.num_tokens)
        if self._tenure is not None and message.epoch == self._tenure.epoch:
            self._tenure.keep(message.result)
            await self._answer(self._tenure, message.result)
        self._spans.finished(message)

    async def _answer(self, tenure: Tenure, result: StepResult) -> None:
        await self.send_to(tenure.scheduler_id, StepCompleted(self.identity.instance_id, tenure.epoch, result))

    def _report(self, event: StepFinished | StepThreadFailed) -> None:
        """Called in the step thread."""
        try:
            self._loop.call_soon_threadsafe(self.post, event)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.warning("a step ended after its process")
