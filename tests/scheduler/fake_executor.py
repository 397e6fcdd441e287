"""An executor whose keys and values are fingerprints, so that a test sees whether a plan was right.

The "key and value" of a position is a fingerprint of all tokens up to it. Computing a row checks that every earlier
position of the slot holds exactly the fingerprint it must; so a block that was shared wrongly, overwritten, evicted
too early or copied too late is an assertion, not a wrong number.

Guesses are right as often as chance has it; what a wrong one leaves in the cache is neither known nor anybody's.

A row that fails leaves poison where it was computed, and what reads poison fails too: so a test sees whether somebody
finds the blocks of a request after they were known to be bad.
"""

import zlib
from array import array
from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from shared.messages import CONTINUES, ExecutorCapacity, RowFailure, SlotAssignment, StepPlan, StepResult

VOCABULARY = 50
BECAUSE_OF = "not a number because of "
"""How the reason of a failed row begins; then comes the request whose failure poisoned it."""


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
    """A number that stands for a list of tokens; that of a longer list goes on from it as its salt."""
    return zlib.crc32(array("i", tokens).tobytes(), salt & 0xFFFFFFFF)


Cell = int | str | None
"""A fingerprint, the id of the request whose failure poisoned it, or nothing yet."""
WRONG: Cell = -1
"""What a wrong guess leaves: no fingerprint."""


class _Slot:
    def __init__(self, assignment: SlotAssignment, step_id: int) -> None:
        self.assignment = assignment
        self.assigned_in_step = step_id
        self.tokens: list[int] = []
        self.contents: list[Cell] = []
        """What each position must hold."""
        self.block_table = list(assignment.block_ids)
        self.poison: str | None = None
        """The request whose failure it suffers from."""
        for token in assignment.token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        """One more token is known."""
        before = self.contents[-1] if self.contents else 0
        assert isinstance(before, int)
        self.tokens.append(token)
        self.contents.append(fingerprint([token], before))


class FakeExecutor:
    """Runs step plans on fingerprints."""

    def __init__(self, capacity: ExecutorCapacity, step_seconds: Callable[[StepPlan], float] | None = None) -> None:
        """`step_seconds` is how long it says that a step took."""
        self.capacity = capacity
        self.num_tokens_computed = 0
        self.num_rows_run = 0
        self.failing_requests: set[str] = set()
        self._step_seconds = step_seconds
        self._spoiled_after: dict[str, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._memory: list[list[Cell]] = [[None] * capacity.block_size for _ in range(capacity.num_blocks)]
        self.last_step_id = 0
        self._chance = Random(capacity.num_blocks)

    def run(self, plan: StepPlan) -> StepResult:
        """The result of a plan. Raises AssertionError if following it would compute nonsense."""
        assert plan.step_id == self.last_step_id + 1, "plans out of order"
        self.last_step_id = plan.step_id
        for slot in plan.released:
            assert self._slots.pop(slot, None) is not None, f"slot {slot} was free already"
        for assignment in plan.assigned:
            assert 0 <= assignment.slot < self.capacity.max_slots, "no such slot"
            assert assignment.slot not in self._slots, f"slot {assignment.slot} is taken"
            self._slots[assignment.slot] = _Slot(assignment, plan.step_id)
        copies = [(plan.copies[i], plan.copies[i + 1]) for i in range(0, len(plan.copies), 2)]
        contents = [list(self._memory[source]) for source, _ in copies]
        for (_, destination), content in zip(copies, contents, strict=True):
            self._memory[destination] = content
        return self._compute(plan)

    def spoiled(self, request_id: str, last_step_id: int) -> None:
        """The scheduler knows that a request failed; whoever is assigned after a step must not find its blocks."""
        self._spoiled_after.setdefault(request_id, last_step_id)

    def _compute(self, plan: StepPlan) -> StepResult:
        num_tokens = sum(plan.counts) + sum(plan.max_drafts)
        assert 0 < num_tokens <= self.capacity.max_step_tokens, "an empty or oversized step"
        assert sum(plan.max_drafts) <= self.capacity.max_step_drafts, "more guesses than there is room for"
        assert max(plan.max_drafts, default=0) <= self.capacity.max_draft_tokens, "a guess that is too long"
        assert len(set(plan.slots)) == len(plan.slots), "a slot has two rows"
        new_blocks = iter(plan.new_block_ids)
        for row, slot_id in enumerate(plan.slots):
            slot = self._slots[slot_id]
            slot.block_table += [next(new_blocks) for _ in range(plan.num_new_blocks[row])]
        assert next(new_blocks, None) is None, "more new blocks than rows take"
        starts = [self._start(plan, row) for row in range(len(plan.slots))]
        reaches = list(plan.counts)
        for number, num_drafts in enumerate(plan.max_drafts):
            reaches[plan.sampled_rows[number]] += num_drafts
        self._check_writes_are_private(plan, starts, reaches)
        # All keys and values are written before any row reads: rows must not lean on each other's blocks.
        for row, slot_id in enumerate(plan.slots):
            self._check_prefix(self._slots[slot_id], starts[row])
        for row, slot_id in enumerate(plan.slots):
            self._write(self._slots[slot_id], starts[row], plan.counts[row])
        return self._sample(plan, starts)

    def _start(self, plan: StepPlan, row: int) -> int:
        slot, start = self._slots[plan.slots[row]], plan.starts[row]
        if start != CONTINUES:
            return start
        assert plan.counts[row] == 1, "goes on by more than a token"
        assert row in plan.sampled_rows, "goes on without sampling"
        return len(slot.tokens) - 1

    def _sample(self, plan: StepPlan, starts: list[int]) -> StepResult:
        tokens, failures, counts, drafted = [], [], [], []
        for number, row in enumerate(plan.sampled_rows):
            slot = self._slots[plan.slots[row]]
            assert starts[row] + plan.counts[row] == len(slot.tokens), "samples before all tokens are computed"
            most = plan.max_drafts[number] if plan.max_drafts else 0
            drafted.append(self._chance.choice((0, most, self._chance.randint(0, most))))
            num_right = self._chance.choice((0, drafted[-1], self._chance.randint(0, drafted[-1])))
            counts.append(0)
            while counts[-1] <= num_right:
                tokens.append(self._draw(slot))
                counts[-1] += 1
                if slot.poison is not None:
                    failures.append(RowFailure(number, BECAUSE_OF + slot.poison))
                    break
                if counts[-1] <= num_right:  # it was guessed right, so it is computed
                    self._set(slot, len(slot.tokens) - 1, slot.contents[-1])
            for position in range(len(slot.tokens), starts[row] + plan.counts[row] + drafted[-1]):
                self._set(slot, position, WRONG)
        duration_s = self._step_seconds(plan) if self._step_seconds else 0.0
        result = StepResult(plan.step_id, array("i", tokens), failures=tuple(failures), duration_s=duration_s)
        if any(drafted):
            result = replace(result, num_tokens=array("i", counts), num_drafted=array("i", drafted))
        return result

    def _draw(self, slot: _Slot) -> int:
        """The next token of a slot, whose last known one is computed."""
        assignment = slot.assignment
        if assignment.request_id in self.failing_requests and slot.poison is None:
            slot.poison = assignment.request_id
            self._set(slot, len(slot.tokens) - 1, slot.poison)
        token = 0
        if slot.poison is None:
            token = next_token(slot.tokens, assignment.sampling.seed, assignment.choice_index)
        slot.append(token)
        return token

    def _check_writes_are_private(self, plan: StepPlan, starts: list[int], reaches: list[int]) -> None:
        size = self.capacity.block_size
        written: set[int] = set()
        for slot_id, start, count in zip(plan.slots, starts, reaches, strict=True):
            table = self._slots[slot_id].block_table
            assert start + count <= len(table) * size, "tokens, or guesses, without a block"
            mine = set(table[start // size : (start + count - 1) // size + 1])
            assert not mine & written, f"two rows write the blocks {mine & written}"
            written |= mine

    def _check_prefix(self, slot: _Slot, start: int) -> None:
        """What a row reads is what must be there, or poison."""
        size = self.capacity.block_size
        for first in range(0, start, size):
            length = min(size, start - first)
            block = slot.block_table[first // size]
            found, expected = self._memory[block][:length], slot.contents[first : first + length]
            if found != expected:
                self._take_poison(slot, first, list(zip(found, expected, strict=True)))

    def _take_poison(self, slot: _Slot, first: int, cells: list[tuple[Cell, Cell]]) -> None:
        for offset, (found, expected) in enumerate(cells):
            if isinstance(found, str):
                spoiled_after = self._spoiled_after.get(found, slot.assigned_in_step)
                assert slot.assigned_in_step <= spoiled_after, (
                    f"{slot.assignment.request_id} found a block of {found} although that had failed"
                )
                slot.poison = slot.poison or found
            else:
                assert found == expected, f"position {first + offset} of {slot.assignment.request_id} is not there"

    def _write(self, slot: _Slot, start: int, count: int) -> None:
        assert count > 0, "an empty row"
        assert start + count <= len(slot.tokens), "computes tokens that are not known"
        for position in range(start, start + count):
            self._set(slot, position, slot.poison or slot.contents[position])
        self.num_tokens_computed += count
        self.num_rows_run += 1

    def _set(self, slot: _Slot, position: int, content: Cell) -> None:
        index, offset = divmod(position, self.capacity.block_size)
        self._memory[slot.block_table[index]][offset] = content
