"""Continuous batching on one executor: two queues, and a plan a step.

A choice has known tokens, of which some are computed; a step computes some of the rest. Whoever has all known tokens
computed in a step samples the next. Plans may be made before the results of earlier ones are known: a sampled token
counts as in flight until then.

Who goes first, who gives way and how much a step holds are decided by collaborators: `turns`, `policy`, `budget`.
"""

from array import array
from bisect import insort
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter
from typing import Final

from services.scheduler.core import policy
from services.scheduler.core.block_manager import Admission, BlockManager
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.budget import StepLimits, StepShape
from services.scheduler.core.events import Event, RequestEnded
from services.scheduler.core.experience import Experience
from services.scheduler.core.fairness import OUTPUT_TOKEN_WEIGHT, FairShares
from services.scheduler.core.pins import PinnedBlocks
from services.scheduler.core.pipeline import Pipeline, PlannedStep
from services.scheduler.core.plan import PlanBuilder, longest_choice
from services.scheduler.core.prefix_cache import PrefixCache
from services.scheduler.core.prefix_wait import ComingPrefixes
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
    TokenLogprobs,
    int32s,
)

_place = attrgetter("place")

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
        self.running: list[Choice] = []
        """In order of place."""
        self.waiting = WaitingQueue(shares, max_wait_tokens)
        self.num_preemptions = 0
        self.num_outstanding_tokens = 0
        """Tokens known but not computed, of all that run and wait; those in flight count as computed."""
        self.blocks = BlockManager(BlockPool(capacity.num_blocks), cache, capacity.block_size)
        self.pins = PinnedBlocks(self.blocks)
        self.experience = Experience(limits, capacity.max_draft_tokens)
        self._share_prompts = share_prompts
        self._slots = Slots(capacity.max_slots)
        self._turns = Turns(self.waiting, self._slots, self.blocks)
        self._pipeline = Pipeline()

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

    def stop(self, choice: Choice, num_tokens: int) -> list[Event]:
        """Finish a choice because its text reached a stop string with its first `num_tokens` output tokens.

        Nothing if it has ended, or never had so many.
        """
        if choice.is_finished or not 0 < num_tokens <= len(choice.output):
            return []
        if choice.num_in_flight:
            self.blocks.forget_after(choice, len(choice.request.prompt) + num_tokens)
        self.num_outstanding_tokens -= len(choice.output) - num_tokens
        choice.cut(num_tokens)
        self._finish(choice, FinishReason.STOP)
        last = ChoiceTokens(choice.request.request_id, choice.index, num_tokens, int32s(), FinishReason.STOP)
        return [last, *self._ended(choice.request)]

    def evacuate(self) -> None:
        """Take everything from an executor that is gone: its choices wait for another, with the tokens they have."""
        for choice in self.running:
            self._unseat(choice)
            choice.move_to(ChoiceState.PREEMPTED)
        self._pipeline.abandon()
        self.running = []
        for choice in self.waiting:
            choice.key_chain = None
        self.waiting.clear()
        self.num_outstanding_tokens = 0

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
        failures = {failure.row: failure.reason for failure in result.failures}
        for row, num_allowed in enumerate(step.max_drafts):
            if num_allowed:
                step.sampled[row].num_drafts_in_flight -= num_allowed
        if result.num_tokens:
            return self._apply_drafted(step, result, failures)
        logprobs = result.logprobs or (None,) * len(step.sampled)
        events: list[Event] = []
        for row, (choice, token_id) in enumerate(zip(step.sampled, result.token_ids, strict=True)):
            choice.num_in_flight -= 1
            if failures and row in failures:
                self.blocks.spoil(choice)
                events += self.end(choice.request, Outcome.FAILED, failures[row])
            elif choice.state is not ChoiceState.FINISHED:
                events.append(self._append(choice, token_id, logprobs[row]))
                if choice.finish_reason is not None:
                    events += self._ended(choice.request)
        return events

    def _apply_drafted(self, step: PlannedStep, result: StepResult, failures: Mapping[int, str]) -> list[Event]:
        """`apply` for a step that made guesses: a row may have several tokens."""
        events: list[Event] = []
        end = 0
        rows = zip(step.sampled, result.num_tokens, result.num_drafted, strict=True)
        for row, (choice, count, num_drafted) in enumerate(rows):
            start, end = end, end + count
            choice.num_in_flight -= 1
            self.experience.drafting.guessed(choice, num_drafted, count - 1)
            choice.request.num_guessed += num_drafted
            num_sampled = count - (row in failures)
            if num_sampled and choice.state is not ChoiceState.FINISHED:
                tokens = result.token_ids[start : start + num_sampled]
                events += self._append_several(choice, tokens, result.logprobs[start : start + num_sampled])
            if row in failures:
                self.blocks.spoil(choice)
                events += self.end(choice.request, Outcome.FAILED, failures[row])
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
        self._slots.check_invariants(self.running)
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

    def _make_way(self) -> Choice | None:
        """Preempt for one that has more right to be there, if that lets it in. Returns that one."""
        newcomer, victims = self._turns.claim(self.running)
        for choice in victims:
            assert newcomer is not None
            choice.num_times_gave_way += choice.request.priority == newcomer.request.priority
            self._preempt(choice)
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
        drafts = self._allow_drafts(outputs, grown) if self.capacity.max_draft_tokens else []
        step.compute_outputs(outputs, grown, drafts)
        return [choice for choice in prompts if choice.state is ChoiceState.RUNNING]

    def _allow_drafts(self, outputs: list[Choice], grown: dict[int, list[BlockId]]) -> list[tuple[int, int]]:
        """How many tokens may be guessed for which of the outputs, by place; blocks for them come to `grown`.

        Nobody gives way for a guess: it gets blocks that are to spare, or is not made.
        """
        num_left = min(self.capacity.max_step_drafts, self.limits.max_tokens - len(outputs))
        drafts: list[tuple[int, int]] = []
        drafting = self.experience.drafting
        price = drafting.price
        for row, choice in enumerate(outputs):
            if num_left <= 0:
                break
            if (num_wanted := drafting.num_tokens(choice, price)) == 0:
                continue
            num_output = len(choice.output) + choice.num_in_flight + choice.num_drafts_in_flight
            num_tokens = min(num_wanted, choice.request.max_tokens - num_output - 1, num_left)
            if num_tokens > 0 and self._grow_for_drafts(choice, num_tokens, row, grown):
                drafts.append((row, num_tokens))
                num_left -= num_tokens
        return drafts

    def _grow_for_drafts(self, choice: Choice, num_tokens: int, row: int, grown: dict[int, list[BlockId]]) -> bool:
        """Blocks for so many guesses after a choice's next token, if there are any to spare."""
        num_reached = choice.num_drafts_in_flight + 1 + num_tokens
        if self.blocks.num_missing(choice, num_reached) > 0:
            headroom = policy.admission_headroom(len(self.running))
            new_blocks = self.blocks.grow(choice, num_reached, headroom=headroom)
            if new_blocks is None:
                return False
            grown[row] = grown.get(row, []) + new_blocks
        return True

    def _grow(self, choice: Choice) -> list[BlockId] | None:
        """Blocks for a choice's next token, wherever guesses put it; None if the choice had to give way itself."""
        while (new_blocks := self.blocks.grow(choice, choice.num_drafts_in_flight + 1)) is None:
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
            self._seat(choice)
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
        self._let_wait([choice for choice, share in zip(prompts, shares, strict=True) if not share], step.num_tokens)

    def _let_wait(self, choices: list[Choice], num_tokens: int) -> None:
        """Running choices got nothing of a step of so many tokens: that is waiting too."""
        for choice in choices:
            choice.num_tokens_waited += num_tokens
            if choice.num_tokens_waited >= self.waiting.max_wait_tokens and self._slots.num_by_age_left:
                self._slots.promote(choice)
        self.running.sort(key=_place)

    def _order_of_prompts(self, choice: Choice) -> tuple[float, float, tuple[float, int, int]]:
        return choice.place[0], self.waiting.shares.served(choice.request.tenant), choice.place

    def _close_plan(self, step: PlanBuilder) -> StepPlan:
        self._slots.forget_freed()
        shape = StepShape(step.num_output_rows, step.num_tokens - step.num_output_rows)
        self._pipeline.add(step.sampled, shape, step.max_drafts)
        self.waiting.pass_tokens(step.num_tokens)
        self.num_outstanding_tokens -= step.num_tokens
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
                self.waiting.add(choice)
                self.num_outstanding_tokens += choice.num_uncomputed_tokens

    def _seat(self, choice: Choice) -> None:
        is_overdue = self.waiting.is_overdue(choice)
        self.waiting.remove(choice)
        self.num_outstanding_tokens -= choice.num_computed_tokens
        choice.num_tokens_charged = max(choice.num_tokens_charged, choice.num_computed_tokens)
        if choice.state is ChoiceState.WAITING and choice.index == 0:
            choice.request.num_cached_tokens = choice.num_computed_tokens
        choice.move_to(ChoiceState.RUNNING)
        self._slots.give(choice, is_overdue=is_overdue)
        insort(self.running, choice, key=_place)

    def _unseat(self, choice: Choice) -> None:
        self.num_outstanding_tokens += choice.num_computed_tokens
        self.blocks.commit(choice)
        self.blocks.free(choice)
        self._slots.take_back(choice)

    def _preempt(self, choice: Choice) -> None:
        self._unseat(choice)
        self.running.remove(choice)
        choice.move_to(ChoiceState.PREEMPTED)
        self.waiting.add(choice)
        self.num_preemptions += 1

    def _append(self, choice: Choice, token_id: int, logprobs: TokenLogprobs | None) -> ChoiceTokens:
        """One more token of a choice; it finishes if that is its last."""
        offset = len(choice.output)
        reason = choice.append(token_id, logprobs)
        self.num_outstanding_tokens += 1
        if reason is not None:
            self._finish(choice, reason)
        request_id, token_ids = choice.request.request_id, array("i", (token_id,))
        if logprobs is None:
            return ChoiceTokens(request_id, choice.index, offset, token_ids, reason)
        return ChoiceTokens(request_id, choice.index, offset, token_ids, reason, (logprobs,))

    def _append_several(
        self, choice: Choice, token_ids: Int32Array, logprobs: tuple[TokenLogprobs | None, ...]
    ) -> Iterable[Event]:
        """One or more tokens of a choice, whose keys and values are all computed but for the last one's."""
        offset, num_taken = len(choice.output), 0
        reason: FinishReason | None = None
        while reason is None and num_taken < len(token_ids):
            reason = choice.append(token_ids[num_taken], logprobs[num_taken] if logprobs else None)
            num_taken += 1
        self.num_outstanding_tokens += num_taken
        choice.request.num_guessed_right += num_taken - 1
        if choice.state is ChoiceState.RUNNING:
            self._count_guessed(choice, num_taken - 1)
        if reason is not None:
            self._finish(choice, reason)
        told = () if choice.request.sampling.num_logprobs is None else logprobs[:num_taken]
        event = ChoiceTokens(choice.request.request_id, choice.index, offset, token_ids[:num_taken], reason, told)
        return (event,) if reason is None else (event, *self._ended(choice.request))

    def _count_guessed(self, choice: Choice, num_tokens: int) -> None:
        """So many tokens were guessed right: they are computed, without a plan that said so."""
        choice.num_computed_tokens += num_tokens
        self.num_outstanding_tokens -= num_tokens
        if (num_new := choice.num_computed_tokens - choice.num_tokens_charged) > 0:
            self.waiting.shares.charge(choice.request.tenant, OUTPUT_TOKEN_WEIGHT * num_new)
            choice.num_tokens_charged = choice.num_computed_tokens

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
            self.experience.output_had(len(choice.output))

    def _ended(self, request: Request) -> Iterable[Event]:
        return (RequestEnded(request, Outcome.COMPLETED),) if request.is_finished else ()
