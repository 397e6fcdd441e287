"""What the executor remembers of each running choice, by slot, and how a step plan changes it.

Owns token ids, lengths and block tables, as arrays over all slots, so that a batch is built by indexing. Owns the check
that a plan keeps the protocol. Does not own KV tensors, nor any decision: the plan decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from shared.ids import RequestId
from shared.messages import CONTINUES, ExecutorCapacity, Int32Array, SlotAssignment, StepPlan
from shared.sampling import SamplingParams

Ints = npt.NDArray[np.int32]


class PlanError(Exception):
    """A plan that breaks the protocol: a bug of whoever made it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What drawing a choice's next token depends on."""

    request_id: RequestId
    index: int
    sampling: SamplingParams
    num_prompt_tokens: int
    token_ids: Ints
    """Prompt first; a view that stays right only until the slot changes."""

    @property
    def num_output_tokens(self) -> int:
        """Also the position in the output of the token to be drawn next."""
        return len(self.token_ids) - self.num_prompt_tokens


class SlotTable:
    """The state of all slots. `apply` takes in a plan, `append_tokens` what it sampled."""

    def __init__(self, capacity: ExecutorCapacity, vocab_size: int) -> None:
        self._capacity = capacity
        self._vocab_size = vocab_size
        max_blocks = -(-(capacity.max_model_len + 1) // capacity.block_size)
        # One token more than the model takes: the last sampled token is known but never computed.
        self.token_ids: Final = np.zeros((capacity.max_slots, capacity.max_model_len + 1), np.int32)
        self.num_tokens: Final = np.zeros(capacity.max_slots, np.int32)
        self.block_ids: Final = np.zeros((capacity.max_slots, max_blocks), np.int32)
        self.num_blocks: Final = np.zeros(capacity.max_slots, np.int32)
        self._assignments: list[SlotAssignment | None] = [None] * capacity.max_slots

    def clear(self) -> None:
        """Empty every slot."""
        self._assignments = [None] * self._capacity.max_slots
        self.num_tokens[:] = 0
        self.num_blocks[:] = 0

    def apply(self, plan: StepPlan) -> None:
        """Release, assign and append blocks, in this order, then check that the rows can be computed.

        Raises PlanError that names the step, and the row or slot at fault.
        """
        try:
            for slot in plan.released:
                self._release(slot)
            for assignment in plan.assigned:
                self._assign(assignment)
            self._check_block_ids(plan.copies)
            self._check_lengths(plan)
            self._append_blocks(plan)
            self._check_rows(plan)
        except PlanError as error:
            raise PlanError(f"step {plan.step_id}: {error}") from None

    def choice(self, slot: int, num_more: int = 0) -> Choice:
        """What a drawing from this slot depends on, if the next `num_more` guesses are right. Raises PlanError for an
        empty slot."""
        assignment = self._held(slot)
        return Choice(
            request_id=assignment.request_id,
            index=assignment.choice_index,
            sampling=assignment.sampling,
            num_prompt_tokens=assignment.num_prompt_tokens,
            token_ids=self.token_ids[slot, : self.num_tokens[slot] + num_more],
        )

    def append_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """The slot's next tokens are known."""
        first = self.num_tokens[slot]
        self.num_tokens[slot] = first + len(token_ids)
        self.token_ids[slot, first : self.num_tokens[slot]] = token_ids

    def _held(self, slot: int) -> SlotAssignment:
        assignment = self._assignments[slot] if 0 <= slot < len(self._assignments) else None
        if assignment is None:
            raise PlanError(f"slot {slot} is empty, or not one of 0 to {len(self._assignments) - 1}")
        return assignment

    def _release(self, slot: int) -> None:
        self._held(slot)
        self._assignments[slot] = None
        self.num_tokens[slot] = 0
        self.num_blocks[slot] = 0

    def _assign(self, assignment: SlotAssignment) -> None:
        slot, token_ids = assignment.slot, np.frombuffer(assignment.token_ids, np.int32)
        if not 0 <= slot < len(self._assignments):
            raise PlanError(f"slot {slot} is not one of 0 to {len(self._assignments) - 1}")
        if self._assignments[slot] is not None:
            raise PlanError(f"slot {slot} is assigned again without having been released")
        if not 1 <= len(token_ids) <= self._capacity.max_model_len:
            raise PlanError(f"slot {slot} gets {len(token_ids)} tokens, not 1 to {self._capacity.max_model_len}")
        if not 0 <= assignment.num_prompt_tokens <= len(token_ids):
            raise PlanError(f"slot {slot}: {assignment.num_prompt_tokens} of {len(token_ids)} tokens are the prompt")
        if (outside := token_ids[(token_ids < 0) | (token_ids >= self._vocab_size)]).size:
            raise PlanError(f"slot {slot}: token {outside[0]} is outside the vocabulary of {self._vocab_size}")
        self._assignments[slot] = assignment
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.num_tokens[slot] = len(token_ids)
        self._append(slot, assignment.block_ids)

    def _append_blocks(self, plan: StepPlan) -> None:
        taken = 0
        for slot, count in zip(plan.slots, plan.num_new_blocks, strict=True):
            if count:
                self._append(slot, plan.new_block_ids[taken : taken + count])
                taken += count

    def _append(self, slot: int, block_ids: Int32Array) -> None:
        self._held(slot)
        self._check_block_ids(block_ids)
        first, end = self.num_blocks[slot], self.num_blocks[slot] + len(block_ids)
        if end > self.block_ids.shape[1]:
            raise PlanError(f"slot {slot} gets {end} blocks; the longest sequence needs {self.block_ids.shape[1]}")
        self.block_ids[slot, first:end] = block_ids
        self.num_blocks[slot] = end

    def _check_block_ids(self, block_ids: Sequence[int]) -> None:
        if len(block_ids) and not 0 <= min(block_ids) <= max(block_ids) < self._capacity.num_blocks:
            raise PlanError(f"block ids {min(block_ids)} to {max(block_ids)}; there are {self._capacity.num_blocks}")

    def _check_lengths(self, plan: StepPlan) -> None:
        """Raise PlanError unless the plan's parallel arrays fit each other."""
        num_rows = len(plan.slots)
        if not num_rows == len(plan.starts) == len(plan.counts) == len(plan.num_new_blocks):
            raise PlanError("slots, starts, counts and num_new_blocks differ in length")
        if min(plan.num_new_blocks, default=0) < 0 or sum(plan.num_new_blocks) != len(plan.new_block_ids):
            raise PlanError(f"rows take {sum(plan.num_new_blocks)} of {len(plan.new_block_ids)} new blocks")
        if len(plan.copies) % 2:
            raise PlanError("copies are not pairs")
        if len(set(plan.slots)) != num_rows:
            raise PlanError("a slot has two rows")
        num_tokens = sum(plan.counts) + sum(plan.max_drafts)
        if num_tokens > self._capacity.max_step_tokens:
            raise PlanError(f"{num_tokens} tokens, the limit is {self._capacity.max_step_tokens}")
        sampled = set(plan.sampled_rows)
        if len(sampled) != len(plan.sampled_rows) or not sampled <= set(range(num_rows)):
            raise PlanError(f"sampled rows {list(plan.sampled_rows)} are not distinct rows of {num_rows}")
        self._check_drafts(plan)

    def _check_drafts(self, plan: StepPlan) -> None:
        """Raise PlanError unless drafts are allowed to rows that sample, and to each and in all no more than there is
        room for."""
        if not plan.max_drafts:
            return
        most, num_sampled = self._capacity.max_draft_tokens, len(plan.sampled_rows)
        if len(plan.max_drafts) != num_sampled:
            raise PlanError(f"{len(plan.max_drafts)} limits of drafts for {num_sampled} sampled rows")
        if not 0 <= min(plan.max_drafts) <= max(plan.max_drafts) <= most:
            raise PlanError(f"drafts of {max(plan.max_drafts)} tokens; this executor guesses 0 to {most}")
        if sum(plan.max_drafts) > self._capacity.max_step_drafts:
            raise PlanError(f"{sum(plan.max_drafts)} drafts, the limit is {self._capacity.max_step_drafts}")

    def _check_rows(self, plan: StepPlan) -> None:
        """Raise PlanError unless every row's tokens are known and its block table reaches them."""
        for slot in plan.slots:
            self._held(slot)
        slots, starts, counts = (np.array(numbers, np.int64) for numbers in (plan.slots, plan.starts, plan.counts))
        known = self.num_tokens[slots]
        goes_on = starts == CONTINUES
        starts[goes_on] = known[goes_on] - 1
        ends = starts + counts
        is_sampled = np.zeros(len(slots), np.bool_)
        is_sampled[list(plan.sampled_rows)] = True
        if plan.max_drafts:
            self._check_reach(plan)
        for is_wrong, what in (
            ((starts < 0) | (counts < 1), "computes no tokens"),
            (goes_on & ((counts != 1) | ~is_sampled), "goes on, but not by one token that samples"),
            (ends > known, "computes tokens that are not known yet"),
            (ends > self._capacity.max_model_len, f"goes beyond {self._capacity.max_model_len} tokens"),
            (ends > self.num_blocks[slots] * self._capacity.block_size, "computes tokens that have no block"),
            (is_sampled & (ends != known), "samples, but its last token is not the last known one"),
        ):
            if is_wrong.any():
                row = int(is_wrong.argmax())
                raise PlanError(
                    f"row {row} (slot {slots[row]}, tokens {starts[row]} to {ends[row] - 1} of {known[row]}, "
                    f"{self.num_blocks[slots[row]]} blocks) {what}"
                )

    def _check_reach(self, plan: StepPlan) -> None:
        """Raise PlanError unless the model and the block tables have room for every guess."""
        slots = np.array(plan.slots, np.int64)[list(plan.sampled_rows)]
        reach = self.num_tokens[slots] + np.array(plan.max_drafts, np.int64)
        room = np.minimum(self.num_blocks[slots] * self._capacity.block_size, self._capacity.max_model_len)
        if (reach > room).any():
            row = int((reach > room).argmax())
            raise PlanError(f"slot {slots[row]} may guess up to token {reach[row]}, and has room for {room[row]}")
