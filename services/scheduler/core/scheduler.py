"""Continuous batching on one executor: two queues, and a plan a step.

A choice has known tokens, of which some are computed; a step computes some of the rest. Whoever has all known tokens
computed in a step samples the next. Plans may be made before the results of earlier ones are known: a sampled token
counts as in flight until then.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from services.scheduler.core import policy
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.plan import PlanBuilder
from services.scheduler.core.prefix_cache import PrefixCache
from services.scheduler.core.request import Choice, ChoiceState, Request
from shared.ids import SlotId
from shared.messages import (
    ChoiceTokens,
    ExecutorCapacity,
    FinishReason,
    Outcome,
    StepPlan,
    StepResult,
    TokenLogprobs,
    int32s,
)

_place = attrgetter("place")


class StepMismatch(Exception):
    """A result that is not the one expected next."""


class Scheduler:
    """The requests of one executor."""

    def __init__(self, capacity: ExecutorCapacity, limits: policy.StepLimits, cache: PrefixCache) -> None:
        self.capacity = capacity
        self.running: list[Choice] = []
        """In order of place."""
        self.waiting: list[Choice] = []
        """In order of place; new and preempted ones alike."""
        self.num_preemptions = 0
        self.blocks = BlockManager(BlockPool(capacity.num_blocks), cache, capacity.block_size)
        self._limits = limits
        self._free_slots = [SlotId(slot) for slot in reversed(range(capacity.max_slots))]
        self._released_slots = array("i")
        self._in_flight: deque[tuple[int, list[Choice]]] = deque()
        self._next_step_id = 1

    # Requests come and go.

    def can_hold(self, request: Request) -> bool:
        """Whether the request could run here if it were alone."""
        capacity = self.capacity
        return request.max_total_tokens <= min(capacity.max_model_len, capacity.num_blocks * capacity.block_size)

    def add(self, request: Request) -> None:
        """Queue a request that this executor can hold."""
        for choice in request.choices:
            if choice.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED):
                insort(self.waiting, choice, key=_place)

    def end(self, request: Request, outcome: Outcome, reason: str | None = None) -> list[Event]:
        """Finish all that is left of a request, whatever it is doing; nothing if it has ended."""
        if request.is_finished:
            return []
        for choice in reversed(request.choices):  # the first last, so that it frees none that are held
            if not choice.is_finished:
                self._finish(choice, None)
        return [RequestEnded(request, outcome, reason)]

    def cancel(self, request: Request) -> list[Event]:
        """Finish a request because its client wants no more."""
        return self.end(request, Outcome.CANCELLED)

    def stop(self, choice: Choice, num_tokens: int) -> list[Event]:
        """Finish a choice because its text reached a stop string with its first `num_tokens` output tokens."""
        if choice.is_finished or num_tokens > len(choice.output):
            return []
        del choice.output[num_tokens:]
        del choice.logprobs[num_tokens:]
        self._finish(choice, FinishReason.STOP)
        last = ChoiceTokens(choice.request.request_id, choice.index, num_tokens, int32s(), FinishReason.STOP)
        return [last, *self._ended(choice.request)]

    def evacuate(self) -> None:
        """Take everything from an executor that is gone: its choices wait for another, with the tokens they have."""
        for choice in self.running:
            self._unseat(choice)
            choice.move_to(ChoiceState.PREEMPTED)
        for _, sampled in self._in_flight:
            for choice in sampled:
                choice.num_in_flight = 0
        self._in_flight.clear()
        self.running = []
        self.waiting = []

    # Steps.

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        step = PlanBuilder(self._next_step_id, self._limits.max_tokens, self._released_slots)
        self._continue_running(step)
        self._admit_waiting(step)
        if not step.has_rows:
            return None
        return self._close_plan(step)

    def apply(self, result: StepResult) -> list[Event]:
        """Take in what a step sampled. Raises StepMismatch, and changes nothing, unless it is the oldest in flight."""
        if not self._in_flight or self._in_flight[0][0] != result.step_id:
            expected = self._in_flight[0][0] if self._in_flight else "none"
            raise StepMismatch(f"got the result of step {result.step_id}, expected {expected}")
        _, sampled = self._in_flight[0]
        if len(sampled) != len(result.token_ids):
            raise StepMismatch(f"step {result.step_id} sampled {len(result.token_ids)} tokens, expected {len(sampled)}")
        self._in_flight.popleft()
        failures = {failure.row: failure.reason for failure in result.failures}
        logprobs = result.logprobs or (None,) * len(sampled)
        events: list[Event] = []
        for row, choice in enumerate(sampled):
            choice.num_in_flight -= 1
            if choice.is_finished:
                continue
            if row in failures:
                self.blocks.spoil(choice)
                events += self.end(choice.request, Outcome.FAILED, failures[row])
            else:
                events += self._append(choice, result.token_ids[row], logprobs[row])
        return events

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens known but not computed, of all that run and wait."""
        return sum(choice.num_known_tokens - choice.num_computed_tokens for choice in self.running + self.waiting)

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, slots and blocks do not agree with one another."""
        self.blocks.check_invariants(self.running)
        slots = [choice.slot for choice in self.running]
        assert None not in slots, "a running choice has no slot"
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots) == self.capacity.max_slots, (
            "slots"
        )
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_place), "a queue is out of order"
        assert all(choice.state is ChoiceState.RUNNING for choice in self.running), "not running"
        assert all(c.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED) for c in self.waiting), "not waiting"
        assert all(c.slot is None and not c.block_table for c in self.waiting), "a waiting choice holds something"
        for choice in self.running:
            assert choice.num_computed_tokens <= choice.num_known_tokens + choice.num_in_flight, "computed the unknown"
            assert len(choice.block_table) * self.capacity.block_size >= choice.num_computed_tokens, "blocks missing"

    def _continue_running(self, step: PlanBuilder) -> None:
        """Give those that run their share of the step; who is last in order gives way when blocks are short."""
        running = self.running
        needs = [choice.num_tokens_to_compute for choice in running]
        shares = policy.share_budget(needs, self._limits)
        for choice, need, share in zip(tuple(running), needs, shares, strict=True):
            if choice.state is not ChoiceState.RUNNING:
                return  # gave way to those before it, as did all after it
            if share == 0:
                continue
            new_blocks = self.blocks.grow(choice, share)
            while new_blocks is None:
                victim = policy.victim(running)
                self._preempt(victim)
                if victim is choice:
                    return
                new_blocks = self.blocks.grow(choice, share)
            step.compute(choice, share, new_blocks, samples=share == need)

    def _admit_waiting(self, step: PlanBuilder) -> None:
        """Seat those that wait, in order, while there are slots, blocks and room in the step."""
        while self.waiting and self._free_slots and step.num_tokens_left > 0:
            choice = self.waiting[0]
            if choice.num_in_flight:
                return  # its next token is on the way
            headroom = policy.admission_headroom(len(self.running))
            admission = self.blocks.admit(choice, fork_of=self._fork_source(choice, step), headroom=headroom)
            if admission is None:
                return
            del self.waiting[0]
            self._seat(choice)
            step.assign(choice, admission.copied)
            need = choice.num_tokens_to_compute
            share = min(need, step.num_tokens_left, self._limits.max_chunk_tokens)
            step.compute(choice, share, [], samples=share == need)

    def _close_plan(self, step: PlanBuilder) -> StepPlan:
        self._released_slots = array("i")
        self._in_flight.append((step.step_id, step.sampled))
        self._next_step_id += 1
        for choice in self.running:
            self.blocks.commit(choice)
        for choice in step.sampled:
            if len(choice.request.choices) > 1 and choice.index == 0:
                self._free_held(choice.request)
        return step.build()

    def _fork_source(self, choice: Choice, step: PlanBuilder) -> Choice | None:
        """The request's first choice, if the prompt is in its blocks since an earlier step."""
        first = choice.request.choices[0]
        if choice is first or choice.output or first.state is not ChoiceState.RUNNING:
            return None
        return first if step.was_computed_before(first, len(choice.request.prompt)) else None

    def _free_held(self, request: Request) -> None:
        """The prompt is computed: the other choices may start."""
        for choice in request.choices:
            if choice.state is ChoiceState.HELD:
                choice.move_to(ChoiceState.WAITING)
                insort(self.waiting, choice, key=_place)

    def _seat(self, choice: Choice) -> None:
        if choice.state is ChoiceState.WAITING and choice.index == 0:
            choice.request.num_cached_tokens = choice.num_computed_tokens
        choice.move_to(ChoiceState.RUNNING)
        choice.slot = self._free_slots.pop()
        insort(self.running, choice, key=_place)

    def _unseat(self, choice: Choice) -> None:
        self.blocks.commit(choice)
        self.blocks.release(choice)
        assert choice.slot is not None
        self._free_slots.append(choice.slot)
        self._released_slots.append(choice.slot)
        choice.slot = None

    def _preempt(self, choice: Choice) -> None:
        self._unseat(choice)
        self.running.remove(choice)
        choice.move_to(ChoiceState.PREEMPTED)
        insort(self.waiting, choice, key=_place)
        self.num_preemptions += 1

    def _append(self, choice: Choice, token_id: int, logprobs: TokenLogprobs | None) -> Iterable[Event]:
        request = choice.request
        offset = len(choice.output)
        choice.output.append(token_id)
        if request.sampling.num_logprobs is not None:
            choice.logprobs.append(logprobs)
        reason = None
        if token_id in request.end_token_ids:
            reason = FinishReason.STOP
        elif len(choice.output) >= request.max_tokens:
            reason = FinishReason.LENGTH
        event = ChoiceTokens(
            request.request_id,
            choice.index,
            offset,
            array("i", (token_id,)),
            reason,
            () if logprobs is None else (logprobs,),
        )
        if reason is None:
            return (event,)
        self._finish(choice, reason)
        return (event, *self._ended(request))

    def _finish(self, choice: Choice, reason: FinishReason | None) -> None:
        if choice.state is ChoiceState.RUNNING:
            self._unseat(choice)
            self.running.remove(choice)
        elif choice in self.waiting:
            self.waiting.remove(choice)
        choice.move_to(ChoiceState.FINISHED)
        choice.finish_reason = reason
        if choice.index == 0:
            self._free_held(choice.request)

    def _ended(self, request: Request) -> Iterable[Event]:
        return (RequestEnded(request, Outcome.COMPLETED),) if request.is_finished else ()
