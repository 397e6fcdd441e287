"""Continuous batching on one executor: two queues, and a plan a step.

A choice has known tokens, of which some are computed; a step computes some of the rest. Whoever has all known tokens
computed in a step samples the next. Plans may be made before the results of earlier ones are known: a sampled token
counts as in flight until then.

Who goes first, who gives way and how much a step holds are decided by collaborators: `waiting`, `policy`, `budget`.
"""

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

from services.scheduler.core import policy
from services.scheduler.core.block_manager import Admission, BlockManager
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.budget import PromptBudget, StepLimits, StepShape
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.pins import PinnedBlocks
from services.scheduler.core.plan import ROW_BYTES, PlanBuilder, assignment_bytes, longest_choice
from services.scheduler.core.preemption import victims_for
from services.scheduler.core.prefix_cache import PrefixCache
from services.scheduler.core.request import Choice, ChoiceState, Request
from services.scheduler.core.step_cost import StepCost, StepCosts
from services.scheduler.core.waiting import WaitingQueue
from shared.ids import BlockId, SlotId
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

_FIRST_TYPICAL_OUTPUT: Final = 64.0
"""Tokens that an output is taken to have before any has ended."""
_NUM_TYPICAL: Final = 32
"""Outputs that the typical one is an average of."""
_LOOK_AHEAD: Final = 16
"""How many of those that wait are looked at in a step."""


class StepMismatch(Exception):
    """A result that is not the one expected next."""


class _InFlight(NamedTuple):
    """A plan whose result has not come yet."""

    step_id: int
    sampled: list[Choice]
    shape: StepShape


class Scheduler:
    """The requests of one executor."""

    def __init__(
        self,
        capacity: ExecutorCapacity,
        limits: StepLimits,
        cache: PrefixCache,
        shares: FairShares,
        *,
        max_wait_tokens: int = 1 << 20,
        share_prompts: policy.PromptSharing = policy.share_prompt_tokens,
    ) -> None:
        """`shares` counts what tenants were served, here and on other executors. Whoever has waited while
        `max_wait_tokens` were computed here goes before everybody else, as long as no more than half of the slots are
        held for that reason. `share_prompts` divides a step's prompt tokens.
        """
        self.capacity = capacity
        self.running: list[Choice] = []
        """In order of place."""
        self.waiting = WaitingQueue(shares, max_wait_tokens)
        self.num_preemptions = 0
        self.num_outstanding_tokens = 0
        """Tokens known but not computed, of all that run and wait; those in flight count as computed."""
        self.blocks = BlockManager(BlockPool(capacity.num_blocks), cache, capacity.block_size)
        self.pins = PinnedBlocks(self.blocks)
        self._budget = PromptBudget(limits)
        self._costs = StepCosts()
        self._share_prompts = share_prompts
        self._shares = shares
        self._free_slots = [SlotId(slot) for slot in reversed(range(capacity.max_slots))]
        self._released_slots = array("i")
        self._in_flight: deque[_InFlight] = deque()
        self._next_step_id = 1
        self.typical_output = _FIRST_TYPICAL_OUTPUT
        """Tokens that outputs have had lately."""

    # Requests come and go.

    @property
    def max_total_tokens(self) -> int:
        """The most tokens of prompt and output that a choice accepted now can have, if it is alone."""
        return self._max_tokens_in(self.capacity.num_blocks - self.pins.num_blocks)

    @property
    def max_tokens_without_pins(self) -> int:
        """The same for one that was accepted before: pins give way to it."""
        return self._max_tokens_in(self.capacity.num_blocks)

    def _max_tokens_in(self, num_blocks: int) -> int:
        capacity = self.capacity
        in_plan = longest_choice(self._budget.limits.max_plan_bytes, capacity.block_size, capacity.max_slots)
        return min(capacity.max_model_len, num_blocks * capacity.block_size, in_plan)

    def withdraw(self, request: Request) -> None:
        """Give up a request of which nothing runs here, so that another executor can have it."""
        for choice in request.choices:
            if choice in self.waiting:
                self.waiting.remove(choice)
                self.num_outstanding_tokens -= choice.num_uncomputed_tokens
                choice.key_chain = None

    def add(self, request: Request) -> None:
        """Queue a request that this executor can hold."""
        for choice in request.choices:
            if choice.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED):
                self.waiting.add(choice)
                self.num_outstanding_tokens += choice.num_uncomputed_tokens

    def end(self, request: Request, outcome: Outcome, reason: str | None = None) -> list[Event]:
        """Finish all that is left of a request, whatever it is doing; nothing if it has ended."""
        if request.is_finished:
            return []
        for choice in request.choices:
            if not choice.is_finished:
                self._finish(choice, None)
        return [RequestEnded(request, outcome, reason)]

    def cancel(self, request: Request) -> list[Event]:
        """Finish a request because its client wants no more."""
        return self.end(request, Outcome.CANCELLED)

    def stop(self, choice: Choice, num_tokens: int) -> list[Event]:
        """Finish a choice because its text reached a stop string with its first `num_tokens` output tokens.

        Nothing if it has ended, or never had so many.
        """
        if choice.is_finished or not 0 < num_tokens <= len(choice.output):
            return []
        self.num_outstanding_tokens -= len(choice.output) - num_tokens
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
        for step in self._in_flight:
            for choice in step.sampled:
                choice.num_in_flight = 0
        self._in_flight.clear()
        self.running = []
        for choice in self.waiting:
            choice.key_chain = None
        self.waiting.clear()
        self.num_outstanding_tokens = 0

    # Steps.

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        step = PlanBuilder(self._next_step_id, self._released_slots)
        newcomer = self._make_way()
        prompts = self._continue_running(step)
        self._admit_waiting(step, prompts, newcomer)
        self._compute_prompts(step, prompts)
        return self._close_plan(step) if step.num_rows else None

    def apply(self, result: StepResult) -> list[Event]:
        """Take in what a step sampled. Raises StepMismatch, and changes nothing, unless it is the oldest in flight."""
        step = self._in_flight[0] if self._in_flight else None
        if step is None or step.step_id != result.step_id:
            raise StepMismatch(f"got the result of step {result.step_id}, expected {step.step_id if step else 'none'}")
        if len(step.sampled) != len(result.token_ids):
            raise StepMismatch(
                f"step {result.step_id} sampled {len(result.token_ids)} tokens, expected {len(step.sampled)}"
            )
        self._in_flight.popleft()
        self._budget.observe(step.shape, result.duration_s)
        self._costs.observe(step.shape, result.duration_s)
        self.blocks.busy_s += result.duration_s
        failures = {failure.row: failure.reason for failure in result.failures}
        logprobs = result.logprobs or (None,) * len(step.sampled)
        events: list[Event] = []
        for row, choice in enumerate(step.sampled):
            choice.num_in_flight -= 1
            if row in failures:
                self.blocks.spoil(choice)
            if choice.is_finished:
                continue
            if row in failures:
                events += self.end(choice.request, Outcome.FAILED, failures[row])
            else:
                events += self._append(choice, result.token_ids[row], logprobs[row])
        return events

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs, waits, or is on its way."""
        return not (self.running or self.waiting or self._in_flight)

    @property
    def has_room(self) -> bool:
        """Whether somebody could be seated now."""
        return bool(self._free_slots) and self.blocks.num_free_blocks > policy.admission_headroom(len(self.running))

    @property
    def step_cost(self) -> StepCost | None:
        """What steps cost here, over the latest ones; None before the first."""
        return self._costs.cost

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, slots and blocks do not agree with one another."""
        self.blocks.check_invariants(self.running, self.pins.counted())
        slots = [choice.slot for choice in self.running]
        assert None not in slots, "a running choice has no slot"
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots) == self.capacity.max_slots, (
            "slots"
        )
        self.waiting.check_invariants()
        assert self.running == sorted(self.running, key=_place), "those that run are out of order"
        outstanding = sum(choice.num_uncomputed_tokens for choice in chain(self.running, self.waiting))
        assert self.num_outstanding_tokens == outstanding, f"{self.num_outstanding_tokens} tokens, not {outstanding}"
        assert all(choice.state is ChoiceState.RUNNING for choice in self.running), "not running"
        assert all(c.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED) for c in self.waiting), "not waiting"
        assert all(c.slot is None and not c.block_table for c in self.waiting), "a waiting choice holds something"
        for choice in self.running:
            assert choice.num_computed_tokens <= choice.num_known_tokens + choice.num_in_flight, "computed the unknown"
            assert len(choice.block_table) * self.capacity.block_size >= choice.num_computed_tokens, "blocks missing"

    @property
    def _num_promotions_left(self) -> int:
        """How many more may hold slots because they waited for too long: half of all slots, at least one."""
        return max(0, max(1, self.capacity.max_slots // 2) - sum(choice.is_promoted for choice in self.running))

    def _make_way(self) -> Choice | None:
        """Preempt for the one that is next if that lets it in, and it has more right to be there. Returns that one."""
        newcomer = self.waiting.head(self._num_promotions_left)
        if newcomer is None or newcomer.num_in_flight or self._is_coming(newcomer, self.running):
            return None
        tenants = self.waiting.tenants | {choice.request.tenant for choice in self.running}
        room = policy.Room(self.capacity.max_slots, self.capacity.num_blocks)
        candidates = policy.who_gives_way(newcomer, self.running, tenants, self._shares, room)
        victims = victims_for(newcomer, self.running, candidates, self.blocks, self.capacity.max_slots)
        for choice in victims:
            choice.num_times_gave_way += choice.request.priority == newcomer.request.priority
            self._preempt(choice)
        return newcomer if victims else None

    def _is_coming(self, choice: Choice, others: list[Choice]) -> bool:
        """Whether one of others, of no worse priority, computes the prefix that a choice lacks: it need only wait."""
        computing = [each for each in others if each.num_tokens_to_compute > 1 and each.place[0] <= choice.place[0]]
        return self.blocks.is_coming(choice, computing)

    def _continue_running(self, step: PlanBuilder) -> list[Choice]:
        """Let every output go on by a token; the last in order gives way when blocks are short. Returns the others:
        those that have prompts, or outputs, to compute before they can sample."""
        running = self.running
        prompts = []
        for choice in tuple(running):
            if choice.state is not ChoiceState.RUNNING:
                break  # gave way to those before it, as did all after it
            need = choice.num_tokens_to_compute
            if need > 1:
                prompts.append(choice)
            elif need == 1:
                new_blocks = self._grow(choice)
                if new_blocks is None:
                    break
                step.compute(choice, 1, new_blocks, samples=True)
        step.num_output_rows = step.num_tokens
        return [choice for choice in prompts if choice.state is ChoiceState.RUNNING]

    def _grow(self, choice: Choice) -> list[BlockId] | None:
        """Blocks for a choice's next token; None if it had to give way itself."""
        while (new_blocks := self.blocks.grow(choice, 1)) is None:
            if len(self.running) == 1 and self.pins.give_way():
                continue
            victim = policy.first_victim(self.running)
            self._preempt(victim)
            if victim is choice:
                return None
        return new_blocks

    def _admit_waiting(self, step: PlanBuilder, prompts: list[Choice], newcomer: Choice | None) -> None:
        """Seat those that wait, in order, while there are slots and blocks, and add them to those with `prompts`.

        Who waits for a prefix that another, of no worse priority, is computing is passed over meanwhile. Who was
        preempted with a token on its way is not: those behind it would take its slot and its blocks. The `newcomer` for
        whom others were preempted comes first: they wait too now, and one may be before it in order.
        """
        order = self.waiting.first(_LOOK_AHEAD, self._num_promotions_left)
        if newcomer is not None:
            order = [newcomer, *(choice for choice in order if choice is not newcomer)]
        for choice in order:
            if choice.num_in_flight or not self._free_slots or not self._fits_plan(choice, step):
                break
            if self._is_coming(choice, prompts):
                continue
            admission = self._admit(choice, step)
            if admission is None:
                break
            self._seat(choice)
            step.assign(choice, admission.copied)
            prompts.append(choice)

    def _admit(self, choice: Choice, step: PlanBuilder) -> Admission | None:
        """Blocks for a choice, if they are there; if nothing runs that could free some, pins give way."""
        fork_of = self._fork_source(choice, step)
        while True:
            headroom = policy.admission_headroom(len(self.running))
            admission = self.blocks.admit(choice, fork_of=fork_of, headroom=headroom)
            if admission is not None or self.running or not self.pins.give_way():
                return admission

    def _fits_plan(self, choice: Choice, step: PlanBuilder) -> bool:
        """Whether the message that carries the step has room for one more assignment, and a row for each slot."""
        num_blocks = -(-choice.num_known_tokens // self.capacity.block_size)
        rows = ROW_BYTES * (self.capacity.max_slots - step.num_rows)
        size = step.num_bytes + rows + assignment_bytes(choice, num_blocks)
        return size <= self._budget.limits.max_plan_bytes

    def _compute_prompts(self, step: PlanBuilder, prompts: list[Choice]) -> None:
        """Share what the step can take beside the outputs among those that have more to compute than one token.

        Their order is that of the queue: many are seated before the step has tokens for them.
        """
        if not prompts:
            return
        prompts.sort(key=self._order_of_prompts)
        needs = [choice.num_tokens_to_compute for choice in prompts]
        budget = self._budget.num_prompt_tokens(step.num_output_rows)
        shares = self._share_prompts(needs, budget, self._budget.limits.max_chunk_tokens)
        for choice, need, share in zip(prompts, needs, shares, strict=True):
            if share:
                step.compute(choice, share, [], samples=share == need)
        self._let_wait([choice for choice, share in zip(prompts, shares, strict=True) if not share], step.num_tokens)

    def _let_wait(self, choices: list[Choice], num_tokens: int) -> None:
        """Running choices got nothing of a step of so many tokens: that is waiting too."""
        for choice in choices:
            choice.num_tokens_waited += num_tokens
            if choice.num_tokens_waited >= self.waiting.max_wait_tokens and self._num_promotions_left:
                choice.promote()
        self.running.sort(key=_place)

    def _order_of_prompts(self, choice: Choice) -> tuple[float, float, tuple[float, int, int]]:
        return choice.place[0], self._shares.served(choice.request.tenant), choice.place

    def _close_plan(self, step: PlanBuilder) -> StepPlan:
        self._released_slots = array("i")
        shape = StepShape(step.num_output_rows, step.num_tokens - step.num_output_rows)
        self._in_flight.append(_InFlight(step.step_id, step.sampled, shape))
        self._next_step_id += 1
        self.waiting.pass_tokens(step.num_tokens)
        self.num_outstanding_tokens -= step.num_tokens
        for tenant, tokens in step.charges.items():
            self._shares.charge(tenant, tokens)
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
                self.waiting.add(choice)
                self.num_outstanding_tokens += choice.num_uncomputed_tokens

    def _seat(self, choice: Choice) -> None:
        if self.waiting.is_overdue(choice) and self._num_promotions_left:
            choice.promote()
        self.waiting.remove(choice)
        self.num_outstanding_tokens -= choice.num_computed_tokens
        choice.num_tokens_charged = max(choice.num_tokens_charged, choice.num_computed_tokens)
        if choice.state is ChoiceState.WAITING and choice.index == 0:
            choice.request.num_cached_tokens = choice.num_computed_tokens
        choice.move_to(ChoiceState.RUNNING)
        choice.slot = self._free_slots.pop()
        insort(self.running, choice, key=_place)

    def _unseat(self, choice: Choice) -> None:
        self.num_outstanding_tokens += choice.num_computed_tokens
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
        self.waiting.add(choice)
        self.num_preemptions += 1

    def _append(self, choice: Choice, token_id: int, logprobs: TokenLogprobs | None) -> Iterable[Event]:
        request = choice.request
        offset = len(choice.output)
        choice.output.append(token_id)
        request.num_losses = 0
        self.num_outstanding_tokens += 1
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
            self.num_outstanding_tokens -= choice.num_uncomputed_tokens
        elif choice in self.waiting:
            self.waiting.remove(choice)
            self.num_outstanding_tokens -= choice.num_uncomputed_tokens
        choice.move_to(ChoiceState.FINISHED)
        choice.finish_reason = reason
        if reason is not None:
            self.typical_output += (len(choice.output) - self.typical_output) / _NUM_TYPICAL

    def _ended(self, request: Request) -> Iterable[Event]:
        return (RequestEnded(request, Outcome.COMPLETED),) if request.is_finished else ()
