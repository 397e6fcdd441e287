"""A scheduler by hand: seats choices, deals out blocks, and makes the plans that a test asks for, step by step."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from services.executor.model_runner import ModelRunner
from shared.ids import RequestId
from shared.messages import RowFailure, SlotAssignment, StepPlan, StepResult, TokenLogprobs, int32s
from shared.sampling import SamplingParams

GREEDY: Final = SamplingParams(seed=0, temperature=0.0)


@dataclasses.dataclass(eq=False)
class Seat:
    """One running choice as the hand scheduler sees it."""

    slot: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int
    blocks: list[int]
    num_computed: int = 0
    is_assigned: bool = False
    logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=list)
    failures: list[RowFailure] = dataclasses.field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_left(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.tokens) - self.num_computed


class Driver:
    """Drives one ModelRunner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.plans: list[StepPlan] = []
        """Every plan that was run."""
        self._free_blocks = list(range(runner.capacity.num_blocks))[::-1]
        self._free_slots = list(range(runner.capacity.max_slots))[::-1]
        self._released: list[int] = []
        self._copies: list[int] = []

    def seat(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        choice_index: int = 0,
        blocks: Sequence[int] = (),
        num_computed: int = 0,
    ) -> Seat:
        """Give a choice a slot; `blocks` may hold `num_computed` of its tokens already."""
        return Seat(
            slot=self._free_slots.pop(),
            tokens=[*prompt, *output],
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            choice_index=choice_index,
            blocks=list(blocks),
            num_computed=num_computed,
        )

    def copy_block(self, source: int) -> int:
        """A new block that has the content of `source` from the next step on."""
        copy = self._free_blocks.pop()
        self._copies += [source, copy]
        return copy

    def release(self, seat: Seat) -> None:
        """Take back the slot and the blocks, to be used again in the very next plan."""
        self._released.append(seat.slot)
        self._free_slots.append(seat.slot)
        self._free_blocks += seat.blocks[::-1]

    def step(self, counts: Mapping[Seat, int], drafts: Mapping[Seat, int] | None = None) -> StepResult:
        """Compute so many tokens of each seat; those whose last known token is computed sample. `drafts` is how many
        may be guessed for those that sample."""
        plan = self.plan(counts, drafts or {})
        result = self.runner.run(plan)
        self.apply(counts, plan, result)
        return result

    def plan(self, counts: Mapping[Seat, int], drafts: Mapping[Seat, int] = MappingProxyType({})) -> StepPlan:
        """The plan of such a step; counts as sent."""
        new_blocks = {
            seat: self._missing_blocks(seat, seat.num_computed + count + drafts.get(seat, 0))
            for seat, count in counts.items()
        }
        sampled = [(row, seat) for row, (seat, count) in enumerate(counts.items()) if count == seat.num_left]
        plan = StepPlan(
            step_id=len(self.plans) + 1,
            released=int32s(self._released),
            assigned=tuple(self._assignment(seat) for seat in counts if not seat.is_assigned),
            copies=int32s(self._copies),
            slots=int32s(seat.slot for seat in counts),
            starts=int32s(seat.num_computed for seat in counts),
            counts=int32s(counts.values()),
            num_new_blocks=int32s(len(blocks) for blocks in new_blocks.values()),
            new_block_ids=int32s(block for blocks in new_blocks.values() for block in blocks),
            sampled_rows=int32s(row for row, _ in sampled),
            max_drafts=int32s(drafts.get(seat, 0) for _, seat in sampled) if drafts else int32s(),
        )
        for seat, blocks in new_blocks.items():
            seat.is_assigned = True
            seat.blocks += blocks
        self._released, self._copies = [], []
        self.plans.append(plan)
        return plan

    def apply(self, counts: Mapping[Seat, int], plan: StepPlan, result: StepResult) -> None:
        """Take in what a step sampled."""
        seats = list(counts)
        for seat, count in counts.items():
            seat.num_computed += count
        counts_of_tokens = result.num_tokens or [1] * len(plan.sampled_rows)
        end = 0
        for row, num_tokens in zip(plan.sampled_rows, counts_of_tokens, strict=True):
            start, end = end, end + num_tokens
            seats[row].tokens += result.token_ids[start:end]
            seats[row].num_computed += num_tokens - 1
            seats[row].logprobs += result.logprobs[start:end] or [None] * num_tokens
        for failure in result.failures:
            seats[plan.sampled_rows[failure.row]].failures.append(failure)

    def run(self, seats: Sequence[Seat], num_tokens: int, *, chunk: int = 1 << 30) -> None:
        """Step all seats together, at most `chunk` tokens of each at once, until each has `num_tokens` of output."""
        while True:
            counts = {seat: min(seat.num_left, chunk) for seat in seats if len(seat.output) < num_tokens}
            if not counts:
                return
            self.step(counts)

    def generate(
        self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams = GREEDY, *, chunk: int = 1 << 30
    ) -> list[int]:
        """The output of one choice that runs alone, and leaves again."""
        seat = self.seat(prompt, sampling)
        self.run([seat], num_tokens, chunk=chunk)
        self.release(seat)
        return seat.output

    def _missing_blocks(self, seat: Seat, num_tokens: int) -> list[int]:
        needed = -(-num_tokens // self.runner.capacity.block_size) - len(seat.blocks)
        return [self._free_blocks.pop() for _ in range(needed)]

    def _assignment(self, seat: Seat) -> SlotAssignment:
        return SlotAssignment(
            slot=seat.slot,
            request_id=RequestId(f"req-{seat.slot}"),
            choice_index=seat.choice_index,
            token_ids=int32s(seat.tokens),
            num_prompt_tokens=seat.num_prompt_tokens,
            sampling=seat.sampling,
            block_ids=int32s(seat.blocks),
        )
