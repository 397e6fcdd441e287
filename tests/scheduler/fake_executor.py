"""An executor whose keys and values are fingerprints, so that a test sees whether a plan was right.

The "key and value" of a position is a fingerprint of all tokens up to it. Computing a row checks that every earlier
position of the slot holds exactly the fingerprint it must; so a block that was shared wrongly, overwritten, evicted
too early or copied too late is an assertion, not a wrong number.
"""

import zlib
from array import array

from shared.messages import ExecutorCapacity, RowFailure, SlotAssignment, StepPlan, StepResult

VOCABULARY = 50


def next_token(tokens: list[int], seed: int, choice_index: int) -> int:
    """The token that the fake model continues `tokens` with."""
    return fingerprint(tokens, seed * 1000 + choice_index) % VOCABULARY


def undisturbed_output(
    prompt: list[int], seed: int, choice_index: int, max_tokens: int, end_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """What a choice must give, computed without any executor."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens, seed, choice_index))
        if tokens[-1] in end_token_ids:
            break
    return tokens[len(prompt) :]


def fingerprint(tokens: list[int], salt: int = 0) -> int:
    """A number that stands for a list of tokens."""
    return zlib.crc32(array("i", tokens).tobytes(), salt & 0xFFFFFFFF)


class _Slot:
    def __init__(self, assignment: SlotAssignment) -> None:
        self.assignment = assignment
        self.tokens = list(assignment.token_ids)
        self.block_table = list(assignment.block_ids)


class FakeExecutor:
    """Runs step plans on fingerprints."""

    def __init__(self, capacity: ExecutorCapacity) -> None:
        self.capacity = capacity
        self.num_tokens_computed = 0
        self.num_rows_run = 0
        self.failing_requests: set[str] = set()
        self._slots: dict[int, _Slot] = {}
        self._memory: list[list[int | None]] = [[None] * capacity.block_size for _ in range(capacity.num_blocks)]
        self._last_step_id = 0

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a plan. Raises AssertionError if following it would compute nonsense."""
        assert plan.step_id == self._last_step_id + 1, "plans out of order"
        self._last_step_id = plan.step_id
        for slot in plan.released:
            assert self._slots.pop(slot, None) is not None, f"slot {slot} was free already"
        for assignment in plan.assigned:
            assert 0 <= assignment.slot < self.capacity.max_slots, "no such slot"
            assert assignment.slot not in self._slots, f"slot {assignment.slot} is taken"
            self._slots[assignment.slot] = _Slot(assignment)
        copies = [(plan.copies[i], plan.copies[i + 1]) for i in range(0, len(plan.copies), 2)]
        contents = [list(self._memory[source]) for source, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            self._memory[destination] = content
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        assert 0 < sum(plan.counts) <= self.capacity.max_step_tokens, "an empty or oversized step"
        assert len(set(plan.slots)) == len(plan.slots), "a slot has two rows"
        new_blocks = iter(plan.new_block_ids)
        for row, slot_id in enumerate(plan.slots):
            slot = self._slots[slot_id]
            slot.block_table += [next(new_blocks) for _ in range(plan.num_new_blocks[row])]
        assert next(new_blocks, None) is None, "more new blocks than rows take"
        # All keys and values are written before any row reads: rows must not lean on each other's blocks.
        for row, slot_id in enumerate(plan.slots):
            self._check_prefix(self._slots[slot_id], plan.starts[row])
        for row, slot_id in enumerate(plan.slots):
            self._write(self._slots[slot_id], plan.starts[row], plan.counts[row])
        return self._sample(plan)

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens, failures = [], []
        for number, row in enumerate(plan.sampled_rows):
            slot = self._slots[plan.slots[row]]
            assert plan.starts[row] + plan.counts[row] == len(slot.tokens), "samples before all tokens are computed"
            if slot.assignment.request_id in self.failing_requests:
                failures.append(RowFailure(number, "not a number"))
                tokens.append(0)
            else:
                tokens.append(next_token(slot.tokens, slot.assignment.sampling.seed, slot.assignment.choice_index))
            slot.tokens.append(tokens[-1])
        return StepResult(plan.step_id, array("i", tokens), failures=tuple(failures))

    def _place(self, slot: _Slot, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.capacity.block_size)
        return slot.block_table[index], offset

    def _check_prefix(self, slot: _Slot, start: int) -> None:
        for position in range(start):
            block, offset = self._place(slot, position)
            expected = fingerprint(slot.tokens[: position + 1])
            assert self._memory[block][offset] == expected, (
                f"position {position} of {slot.assignment.request_id} is not in block {block}"
            )

    def _write(self, slot: _Slot, start: int, count: int) -> None:
        assert count > 0, "an empty row"
        assert start + count <= len(slot.tokens), "computes tokens that are not known"
        for position in range(start, start + count):
            block, offset = self._place(slot, position)
            self._memory[block][offset] = fingerprint(slot.tokens[: position + 1])
        self.num_tokens_computed += count
        self.num_rows_run += 1
