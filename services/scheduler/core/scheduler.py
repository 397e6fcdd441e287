"""Continuous batching on one executor: two queues, and a plan a step.

A choice has known tokens, of which some are computed; a step computes some of the rest. Whoever has all known tokens
computed in a step samples the next. Plans may be made before the results of earlier ones are known: a sampled token
counts as in flight until then.

Who goes first, who gives way, how much a step holds and what is guessed are decided by collaborators: `turns`,
`policy`, `budget`, `guesses`.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from services.scheduler.core import policy
from services.scheduler.core.block_manager import Admission, BlockManager
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.budget import StepLimits, StepShape
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.experience import Experience
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.guesses import Guesses
from services.scheduler.core.pins import PinnedBlocks
from services.scheduler.core.pipeline import Logprobs, Pipeline
from services.scheduler.core.plan import PlanBuilder, longest_choice
from services.scheduler.core.prefix_cache import PrefixCache
from services.scheduler.core.prefix_wait import ComingPrefixes
from services.scheduler.core.queues import Queues
from services.scheduler.core.request import Choice, ChoiceState, Request
from services.scheduler.core.slots import Slots
from services.scheduler.core.turns import Turns
from services.scheduler.core.waiting import WaitingQueue
from shared.ids import BlockId
from shared.messages import (
    ChoiceTokens,
    ExecutorCapacity,
    FinishReason,
    Int32Array,
    Outcome,
    StepPlan,
    StepResult,
    int32s,
)

_MAX_ADMITTED: Final = 16
"""How many are admitted in a step."""


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
        `max_wait_tokens` were computed here goes first, within what `slots` allows for that."""
        self.capacity = capacity
        self.waiting = WaitingQueue(shares, max_wait_tokens)
        self.blocks = BlockManager(BlockPool(capacity.num_blocks), cache, capacity.block_size)
        self.pins = PinnedBlocks(self.blocks)
        self.experience = Experience(limits, capacity.max_draft_tokens)
        self._share_prompts = share_prompts
        self._slots = Slots(capacity.max_slots)
        self._queues = Queues(self.waiting, self._slots, self.blocks)
        self._turns = Turns(self.waiting, self._slots, self.blocks)
        self._guesses = Guesses(capacity, self.experience.drafting, self.blocks, shares)
        self._pipeline = Pipeline()

    @property
    def running(self) -> Sequence[Choice]:
        """Those that run, in order of place."""
        return self._queues.running

    @property
    def num_outstanding_tokens(self) -> int:
        """Tokens known but not computed, of all that run and wait; those in flight count as computed."""
        return self._queues.num_outstanding_tokens

    @property
    def num_preemptions(self) -> int:
        """How often one that ran had to wait again."""
        return self._queues.num_preemptions

    # Requests come and go.

    @property
    def max_total_tokens(self) -> int:
        """The most tokens of prompt and output that a choice accepted now can have, if it is alone."""
        return longest_choice(self.capacity, self.limits, self.capacity.num_blocks - self.pins.num_blocks)

    @property
    def max_tokens_without_pins(self) -> int:
        """The same for one that was accepted before: pins give way to it."""
        return longest_choice(self.capacity, self.limits, self.capacity.num_blocks)

    @property
    def limits(self) -> StepLimits:
        """What one step may hold."""
        return self.experience.budget.limits

    def withdraw(self, request: Request) -> None:
        """Give up a request of which nothing runs here, so that another executor can have it."""
        for choice in request.choices:
            if choice in self.waiting:
                self._queues.withdraw(choice)

    def add(self, request: Request) -> None:
        """Queue a request that this executor can hold."""
        for choice in request.choices:
            if choice.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED):
                self._queues.add(choice)

    def end(self, request: Request, outcome: Outcome, reason: str | None = None) -> list[Event]:
        """Finish all that is left of a request, whatever it is doing; nothing if it has ended."""
        if request.is_finished:
            return []
        for choice in request.choices:
            if not choice.is_finished:
                self._finish(choice, None)
        return [RequestEnded(request, outcome, reason)]

    def stop(self, choice: Choice, num_tokens: int) -> list[Event]:
        """Finish a choice because its text reached a stop string with its first `num_tokens` output tokens.

        Nothing if it has ended, or never had so many.
        """
        if choice.is_finished or not 0 < num_tokens <= len(choice.output):
            return []
        if choice.num_in_flight:
            self.blocks.forget_after(choice, len(choice.request.prompt) + num_tokens)
        self._queues.num_outstanding_tokens -= len(choice.output) - num_tokens
        choice.cut(num_tokens)
        self._finish(choice, FinishReason.STOP)
        last = ChoiceTokens(choice.request.request_id, choice.index, num_tokens, int32s(), FinishReason.STOP)
        return [last, *self._ended(choice.request)]

    def evacuate(self) -> None:
        """Take everything from an executor that is gone: its choices wait for another, with the tokens they have."""
        self._queues.evacuate()
        self._pipeline.abandon()

    # Steps.

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        step = PlanBuilder(self._pipeline.next_step_id, self._slots.freed)
        newcomer = self._make_way()
        prompts = self._continue_running(step)
        self._admit_waiting(step, prompts, newcomer)
        self._compute_prompts(step, prompts)
        return self._close_plan(step) if step.num_rows else None

    def apply(self, result: StepResult) -> list[Event]:
        """Take in what a step sampled. Raises StepMismatch, and changes nothing, unless it is the oldest in flight."""
        step = self._pipeline.take(result)
        self.experience.step_took(step.shape, sum(result.num_drafted), len(result.token_ids), result.duration_s)
        self.blocks.busy_s += result.duration_s
        if result.num_tokens:
            self._guesses.learn(step, result)
        events: list[Event] = []
        for choice, token_ids, logprobs, failure in step.rows(result):
            if token_ids and choice.state is not ChoiceState.FINISHED:
                events.append(self._append(choice, token_ids, logprobs))
                if choice.finish_reason is not None:
                    events += self._ended(choice.request)
            if failure is not None:
                self.blocks.spoil(choice)
                events += self.end(choice.request, Outcome.FAILED, failure)
        return events

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs, waits, or is on its way."""
        return not (self.running or self.waiting or self._pipeline)

    @property
    def has_room(self) -> bool:
        """Whether somebody could be seated now."""
        return self._slots.num_free > 0 and self.blocks.num_free_blocks > policy.admission_headroom(len(self.running))

    def has_spare_blocks(self, num_blocks: int) -> bool:
        """Whether so many are left when the next one is admitted and those that run take what they need next."""
        spare = self.blocks.num_free_blocks - policy.admission_headroom(len(self.running))
        head = next(self.waiting.in_order(self._slots.num_by_age_left), None)
        if head is not None:
            spare -= -(-head.num_known_tokens // self.capacity.block_size)
        return spare >= num_blocks

    def check_invariants(self) -> None:
        """Raise AssertionError if queues, slots and blocks do not agree with one another."""
        self.blocks.check_invariants(self.running, self.pins.counted())
        self._queues.check_invariants()
        for choice in self.running:
            assert choice.num_computed_tokens <= choice.num_known_tokens + choice.num_in_flight, "computed the unknown"
            assert len(choice.block_table) * self.capacity.block_size >= choice.num_computed_tokens, "blocks missing"

    def _make_way(self) -> Choice | None:
        """Preempt for one that has more right to be there, if that lets it in. Returns that one."""
        newcomer, victims = self._turns.claim(self.running)
        for choice in victims:
            assert newcomer is not None
            choice.num_times_gave_way += choice.request.priority == newcomer.request.priority
            self._queues.preempt(choice)
        return newcomer

    def _continue_running(self, step: PlanBuilder) -> list[Choice]:
        """Let every output go on by a token; the last in order gives way when blocks are short. Returns the others:
        those that have prompts, or outputs, to compute before they can sample."""
        prompts: list[Choice] = []
        outputs: list[Choice] = []
        grown: dict[int, list[BlockId]] = {}
        block_size = self.capacity.block_size
        for choice in tuple(self.running):
            if choice.state is not ChoiceState.RUNNING:
                break  # gave way to those before it, as did all after it
            need = choice.num_tokens_to_compute
            if need > 1:
                prompts.append(choice)
            elif need == 1:
                if choice.num_computed_tokens + choice.num_drafts_in_flight >= len(choice.block_table) * block_size:
                    new_blocks = self._grow(choice)
                    if new_blocks is None:
                        break
                    if new_blocks:
                        grown[len(outputs)] = new_blocks
                outputs.append(choice)
        num_left = self.limits.max_tokens - len(outputs)
        guesses = self._guesses.allow(outputs, grown, num_tokens_left=num_left, num_running=len(self.running))
        step.compute_outputs(outputs, grown, guesses)
        return [choice for choice in prompts if choice.state is ChoiceState.RUNNING]

    def _grow(self, choice: Choice) -> list[BlockId] | None:
        """Blocks for a choice's next token, wherever guesses put it; None if the choice had to give way itself."""
        while (new_blocks := self.blocks.grow(choice, choice.num_drafts_in_flight + 1)) is None:
            if len(self.running) == 1 and self.pins.give_way():
                continue
            victim = policy.first_victim(self.running)
            self._queues.preempt(victim)
            if victim is choice:
                return None
        return new_blocks

    def _admit_waiting(self, step: PlanBuilder, prompts: list[Choice], newcomer: Choice | None) -> None:
        """Seat those that wait, in order, while there are slots and blocks, and add them to those with `prompts`.

        Who waits for a prefix that another, of no worse priority, is computing is passed over meanwhile. Who was
        preempted with a token on its way is not: those behind it would take its slot and its blocks.
        """
        coming = ComingPrefixes(self.blocks, prompts)
        num_left = _MAX_ADMITTED
        for choice in self._turns.order(newcomer):
            if not num_left or not self._slots.num_free or choice.num_in_flight:
                break
            if coming.has_of(choice):
                continue
            if not step.has_room_for(choice, self.capacity, self.limits.max_plan_bytes):
                break
            admission = self._admit(choice, step)
            if admission is None:
                break
            self._queues.seat(choice)
            step.assign(choice, admission.copied)
            prompts.append(choice)
            coming.add(choice)
            num_left -= 1

    def _admit(self, choice: Choice, step: PlanBuilder) -> Admission | None:
        """Blocks for a choice, if they are there; if nothing runs that could free some, pins give way."""
        fork_of = self._fork_source(choice, step)
        while True:
            headroom = policy.admission_headroom(len(self.running))
            admission = self.blocks.admit(choice, fork_of=fork_of, headroom=headroom)
            if admission is not None or self.running or not self.pins.give_way():
                return admission

    def _compute_prompts(self, step: PlanBuilder, prompts: list[Choice]) -> None:
        """Share what the step can take beside the outputs among those that have more to compute than one token.

        Their order is that of the queue: many are seated before the step has tokens for them.
        """
        if not prompts:
            return
        prompts.sort(key=self._order_of_prompts)
        needs = [choice.num_tokens_to_compute for choice in prompts]
        budget = self.experience.budget.num_prompt_tokens(step.num_output_rows, step.num_drafts)
        shares = self._share_prompts(needs, budget, self.limits.max_chunk_tokens)
        for choice, need, share in zip(prompts, needs, shares, strict=True):
            if share:
                step.compute(choice, share, [], samples=share == need)
        left_out = [choice for choice, share in zip(prompts, shares, strict=True) if not share]
        self._queues.let_wait(left_out, step.num_tokens)

    def _order_of_prompts(self, choice: Choice) -> tuple[float, float, tuple[float, int, int]]:
        return choice.place[0], self.waiting.shares.served(choice.request.tenant), choice.place

    def _close_plan(self, step: PlanBuilder) -> StepPlan:
        self._slots.forget_freed()
        shape = StepShape(step.num_output_rows, step.num_tokens - step.num_output_rows)
        self._pipeline.add(step.sampled, shape, step.max_drafts)
        self.waiting.pass_tokens(step.num_tokens)
        self._queues.num_outstanding_tokens -= step.num_tokens
        for tenant, tokens in step.charges.items():
            self.waiting.shares.charge(tenant, tokens)
        self.blocks.commit_all(self.running)
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
                self._queues.add(choice)

    def _append(self, choice: Choice, token_ids: Int32Array, logprobs: Logprobs) -> ChoiceTokens:
        """The next tokens of a choice: more than one if guesses were right. It finishes if it wants no more; what is
        left then is dropped."""
        offset = len(choice.output)
        reason = choice.extend(token_ids, logprobs)
        if reason is not None:
            num_taken = len(choice.output) - offset
            token_ids, logprobs = token_ids[:num_taken], logprobs[:num_taken]
        self._queues.num_outstanding_tokens += len(token_ids)
        if len(token_ids) > 1:
            self._count_guessed(choice, len(token_ids) - 1)
        if reason is not None:
            self._finish(choice, reason)
        return ChoiceTokens(choice.request.request_id, choice.index, offset, token_ids, reason, logprobs)

    def _count_guessed(self, choice: Choice, num_tokens: int) -> None:
        """So many tokens of a choice were guessed right."""
        choice.request.num_guessed_right += num_tokens
        if choice.state is ChoiceState.RUNNING:
            self._guesses.count_computed(choice, num_tokens)
            self._queues.num_outstanding_tokens -= num_tokens

    def _finish(self, choice: Choice, reason: FinishReason | None) -> None:
        self._queues.finish(choice)
        choice.finish_reason = reason
        if reason is not None:
            self.experience.output_had(len(choice.output))

    def _ended(self, request: Request) -> Iterable[Event]:
        return (RequestEnded(request, Outcome.COMPLETED),) if request.is_finished else ()
