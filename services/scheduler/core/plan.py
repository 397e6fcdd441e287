"""Collecting a step's orders into the message that the executor gets."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Final

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from services.scheduler.core.request import Choice
from shared.ids import BlockId
from shared.messages import CONTINUES, ExecutorCapacity, Int32Array, SlotAssignment, StepPlan

ROW_BYTES: Final = 40
"""What a row takes in a plan, at most, with a new block and a slot released."""
_ASSIGNMENT_BYTES: Final = 512
"""What an assignment has beside tokens, blocks and the lists in its sampling parameters."""

_MAX_LISTED_BYTES: Final = 24 << 10
"""What logit biases and end tokens take at most: gateways allow 1024 and 128."""


def assignment_bytes(choice: Choice, num_blocks: int) -> int:
    """What a choice's assignment takes in a plan, at most."""
    sampling = choice.request.sampling
    num_listed = 14 * len(sampling.logit_bias) + 5 * len(sampling.end_token_ids)
    return _ASSIGNMENT_BYTES + 4 * (choice.num_known_tokens + num_blocks) + num_listed


def longest_choice(capacity: ExecutorCapacity, limits: StepLimits, num_blocks: int) -> int:
    """The most tokens that a choice can have, however it samples: within so many blocks, what the model allows, and
    what a plan can assign."""
    size = capacity.block_size
    others = 2 * _ASSIGNMENT_BYTES + ROW_BYTES * capacity.max_slots + _MAX_LISTED_BYTES
    in_plan = max(0, (limits.max_plan_bytes - others) * size // (4 * size + 4) - size)
    return min(capacity.max_model_len, num_blocks * size, in_plan)


class PlanBuilder:
    """One step in the making: rows, assignments and copies, and the tokens that are still free in it."""

    def __init__(self, step_id: int, released: Int32Array) -> None:
        """`released` are the slots that lost their choice since the last step."""
        self.step_id = step_id
        self.num_bytes = _ASSIGNMENT_BYTES
        """What the plan takes in a message, at most."""
        self.num_tokens = 0
        self.num_output_rows = 0
        """Rows of outputs that went on; all other rows are of prompts, or of outputs computed again."""
        self.num_drafts = 0
        """Tokens that may be guessed beside them."""
        self.sampled: list[Choice] = []
        """Those that sample in this step, in the order of the result's tokens."""
        self.charges: dict[str, float] = {}
        """What each tenant is served by it, in weighted tokens."""
        self._released = released
        self._assigned: list[SlotAssignment] = []
        self._copies: Int32Array = array("i")
        self._slots: Int32Array = array("i")
        self._starts: Int32Array = array("i")
        self._counts: Int32Array = array("i")
        self._num_new_blocks: Int32Array = array("i")
        self._new_block_ids: Int32Array = array("i")
        self._sampled_rows: Int32Array = array("i")
        self.max_drafts: Int32Array = array("i")
        """For each of `sampled`, how many tokens may be guessed; empty if none for any."""

    @property
    def num_rows(self) -> int:
        """Choices that the step computes tokens of."""
        return len(self._slots)

    def has_room_for(self, choice: Choice, capacity: ExecutorCapacity, max_bytes: int) -> bool:
        """Whether a message of so many bytes carries one more assignment, and a row for each slot."""
        num_blocks = -(-choice.num_known_tokens // capacity.block_size)
        rows = ROW_BYTES * (capacity.max_slots - self.num_rows)
        return self.num_bytes + rows + assignment_bytes(choice, num_blocks) <= max_bytes

    def assign(self, choice: Choice, copied: tuple[BlockId, BlockId] | None) -> None:
        """Have the executor take in a choice, with its tokens and block table as they are now."""
        request = choice.request
        assert choice.slot is not None
        self._assigned.append(
            SlotAssignment(
                slot=choice.slot,
                request_id=request.request_id,
                choice_index=choice.index,
                token_ids=choice.known_tokens(),
                num_prompt_tokens=len(request.prompt),
                sampling=request.sampling,
                block_ids=array("i", choice.block_table),
            )
        )
        self.num_bytes += assignment_bytes(choice, len(choice.block_table))
        if copied is not None:
            self._copies.extend(copied)

    def compute(self, choice: Choice, num_tokens: int, new_blocks: list[BlockId], *, samples: bool) -> None:
        """Have the next `num_tokens` of a choice computed, and the token after them sampled if they are the last."""
        assert choice.slot is not None
        if samples:
            self._sampled_rows.append(len(self._slots))
            self.sampled.append(choice)
            if self.max_drafts:
                self.max_drafts.append(0)
            choice.num_in_flight += 1
        self._slots.append(choice.slot)
        self._starts.append(choice.num_computed_tokens)
        self._counts.append(num_tokens)
        self._num_new_blocks.append(len(new_blocks))
        if new_blocks:
            self._new_block_ids.extend(new_blocks)
        self.num_tokens += num_tokens
        self.num_bytes += ROW_BYTES
        choice.num_computed_tokens += num_tokens
        self._charge(choice)

    def compute_outputs(
        self, choices: list[Choice], grown: Mapping[int, list[BlockId]], drafts: Iterable[tuple[int, int]]
    ) -> None:
        """`compute` for one token each, which is sampled: what nearly every row of a busy step is. They are the first
        rows of the step. `grown` has the new blocks of those that got some, by place in `choices`, and `drafts` places
        with how many tokens may be guessed there."""
        num_rows = self.num_output_rows = len(choices)
        self.sampled += choices
        self._slots.extend([choice.slot for choice in choices if choice.slot is not None])
        self._starts.extend(
            [CONTINUES if choice.num_drafts_in_flight else choice.num_computed_tokens for choice in choices]
        )
        self._counts += array("i", (1,)) * num_rows
        self._sampled_rows.extend(range(num_rows))
        self._num_new_blocks += array("i", (0,)) * num_rows
        for row in sorted(grown):
            new_blocks = grown[row]
            self._num_new_blocks[row] = len(new_blocks)
            self._new_block_ids.extend(new_blocks)
        if drafts:
            self._allow_drafts(choices, drafts)
        self.num_tokens += num_rows
        self.num_bytes += ROW_BYTES * num_rows
        for choice in choices:
            choice.num_in_flight += 1
            num_computed = choice.num_computed_tokens
            choice.num_computed_tokens = num_computed + 1
            if num_computed >= choice.num_tokens_charged:
                self._charge(choice)

    def _allow_drafts(self, choices: list[Choice], drafts: Iterable[tuple[int, int]]) -> None:
        self.max_drafts = array("i", (0,)) * len(choices)
        for row, num_tokens in drafts:
            self.max_drafts[row] = num_tokens
            choices[row].num_drafts_in_flight += num_tokens
            self.num_drafts += num_tokens

    def _charge(self, choice: Choice) -> None:
        """Count what is computed for the first time."""
        num_computed = choice.num_computed_tokens
        num_new = num_computed - choice.num_tokens_charged
        if num_new > 0:
            request = choice.request
            weight = OUTPUT_TOKEN_WEIGHT if num_computed > len(request.prompt) else PROMPT_TOKEN_WEIGHT
            self.charges[request.tenant] = self.charges.get(request.tenant, 0.0) + weight * num_new
            choice.num_tokens_charged = num_computed

    def was_computed_before(self, choice: Choice, num_tokens: int) -> bool:
        """Whether a running choice's first tokens were in its blocks before this step."""
        assert choice.slot is not None
        if choice.slot not in self._slots:
            return choice.num_computed_tokens >= num_tokens
        is_new = any(assignment.slot == choice.slot for assignment in self._assigned)
        return not is_new and self._starts[self._slots.index(choice.slot)] >= num_tokens

    def build(self) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=self.step_id,
            released=self._released,
            assigned=tuple(self._assigned),
            copies=self._copies,
            slots=self._slots,
            starts=self._starts,
            counts=self._counts,
            num_new_blocks=self._num_new_blocks,
            new_block_ids=self._new_block_ids,
            sampled_rows=self._sampled_rows,
            max_drafts=self.max_drafts,
        )
