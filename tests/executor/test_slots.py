"""The slot table: what a plan changes, and every way in which a plan can break the protocol."""

from typing import Any

import msgspec
import pytest

from services.executor.slots import PlanError, SlotTable
from shared.ids import RequestId
from shared.messages import CONTINUES, ExecutorCapacity, SlotAssignment, StepPlan, int32s
from shared.sampling import SamplingParams

CAPACITY = ExecutorCapacity(
    model="tiny", num_blocks=10, block_size=4, max_slots=3, max_model_len=16, max_step_tokens=12, max_draft_tokens=4
)


def assignment(slot: int = 0, **changes: Any) -> SlotAssignment:
    plain = SlotAssignment(
        slot=slot,
        request_id=RequestId("req-1"),
        choice_index=2,
        token_ids=int32s([5, 6, 7, 8, 9]),
        num_prompt_tokens=4,
        sampling=SamplingParams(seed=1),
        block_ids=int32s([3]),
    )
    return msgspec.structs.replace(plain, **changes)


def plan(**changes: Any) -> StepPlan:
    """Assigns slot 0 and computes its five tokens, with one new block."""
    plain: dict[str, Any] = {
        "step_id": 7,
        "assigned": (assignment(),),
        "slots": [0],
        "starts": [0],
        "counts": [5],
        "num_new_blocks": [1],
        "new_block_ids": [4],
        "sampled_rows": [0],
    }
    fields: dict[str, Any] = plain | changes
    packed: dict[str, Any] = {
        name: int32s(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return StepPlan(**packed)


@pytest.fixture
def slots() -> SlotTable:
    return SlotTable(CAPACITY, vocab_size=100)


def test_an_assignment_is_what_a_draw_depends_on(slots: SlotTable) -> None:
    slots.apply(plan())
    choice = slots.choice(0)
    assert (choice.request_id, choice.index, choice.sampling) == ("req-1", 2, SamplingParams(seed=1))
    assert choice.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert (choice.num_prompt_tokens, choice.num_output_tokens) == (4, 1)


def test_a_sampled_token_is_known_from_then_on(slots: SlotTable) -> None:
    slots.apply(plan())
    slots.append_tokens(0, [42])
    assert slots.choice(0).token_ids.tolist() == [5, 6, 7, 8, 9, 42]
    slots.apply(plan(assigned=(), starts=[5], counts=[1], num_new_blocks=[0], new_block_ids=[]))


def test_blocks_are_appended_in_order_to_the_rows_that_take_them(slots: SlotTable) -> None:
    slots.apply(
        plan(
            assigned=(assignment(0), assignment(1, block_ids=int32s([0, 1])), assignment(2)),
            slots=[0, 1, 2],
            starts=[0, 4, 0],
            counts=[5, 1, 5],
            num_new_blocks=[1, 0, 2],
            new_block_ids=[5, 6, 7],
            sampled_rows=[0, 1, 2],
        )
    )
    tables = [slots.block_ids[slot, : slots.num_blocks[slot]].tolist() for slot in range(3)]
    assert tables == [[3, 5], [0, 1], [3, 6, 7]]


def test_a_slot_can_be_released_and_assigned_in_one_plan(slots: SlotTable) -> None:
    slots.apply(plan())
    slots.apply(plan(released=[0], assigned=(assignment(token_ids=int32s([1, 2]), num_prompt_tokens=2),), counts=[2]))
    assert slots.choice(0).token_ids.tolist() == [1, 2]
    assert slots.block_ids[0, : slots.num_blocks[0]].tolist() == [3, 4]


def test_clearing_empties_every_slot(slots: SlotTable) -> None:
    slots.apply(plan())
    slots.clear()
    with pytest.raises(PlanError):
        slots.choice(0)
    slots.apply(plan())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "release of an empty slot": ({"released": [1]}, "slot 1 is empty"),
    "release of a slot that is not there": ({"released": [-1]}, "slot -1 is empty, or not one of 0 to 2"),
    "assignment to a slot that is not there": ({"assigned": (assignment(3),)}, "slot 3 is not one of 0 to 2"),
    "assignment to an occupied slot": ({"assigned": (assignment(), assignment())}, "without having been released"),
    "assignment without tokens": ({"assigned": (assignment(token_ids=int32s(), num_prompt_tokens=0),)}, "0 tokens"),
    "assignment that is too long": ({"assigned": (assignment(token_ids=int32s([1] * 17)),)}, "17 tokens, not 1 to 16"),
    "more prompt than tokens": ({"assigned": (assignment(num_prompt_tokens=6),)}, "6 of 5 tokens are the prompt"),
    "token outside the vocabulary": ({"assigned": (assignment(token_ids=int32s([1, 2, 3, 4, 100])),)}, "token 100"),
    "negative token": ({"assigned": (assignment(token_ids=int32s([1, 2, 3, 4, -1])),)}, "token -1"),
    "assigned block that is not there": ({"assigned": (assignment(block_ids=int32s([10])),)}, "block ids 10 to 10"),
    "new block that is not there": ({"new_block_ids": [-1]}, "block ids -1 to -1"),
    "copy of a block that is not there": ({"copies": [0, 10]}, "block ids 0 to 10"),
    "half a copy": ({"copies": [0]}, "not pairs"),
    "more blocks than any sequence needs": (
        {"assigned": (assignment(block_ids=int32s(range(6))),)},
        "slot 0 gets 6 blocks; the longest sequence needs 5",
    ),
    "arrays of different lengths": ({"counts": [5, 1]}, "differ in length"),
    "too few new blocks": ({"num_new_blocks": [2]}, "rows take 2 of 1 new blocks"),
    "too many new blocks": ({"num_new_blocks": [0]}, "rows take 0 of 1 new blocks"),
    "a negative number of new blocks": (
        {"slots": [0, 1], "starts": [0, 0], "counts": [1, 1], "num_new_blocks": [2, -1]},
        "rows take 1 of 1 new blocks",
    ),
    "two rows of one slot": (
        {"slots": [0, 0], "starts": [0, 2], "counts": [2, 3], "num_new_blocks": [1, 0]},
        "a slot has two rows",
    ),
    "too many tokens": ({"counts": [13]}, "13 tokens, the limit is 12"),
    "sampled row that is not there": ({"sampled_rows": [1]}, "sampled rows"),
    "row sampled twice": ({"sampled_rows": [0, 0]}, "sampled rows"),
    "row of an empty slot": ({"slots": [1], "num_new_blocks": [0], "new_block_ids": []}, "slot 1 is empty"),
    "row of a slot that is not there": ({"slots": [3], "num_new_blocks": [0], "new_block_ids": []}, "slot 3 is empty"),
    "row without tokens": ({"counts": [0]}, "row 0 .* computes no tokens"),
    "negative start": ({"starts": [-2]}, "row 0 .* computes no tokens"),
    "going on by several tokens": ({"starts": [CONTINUES], "counts": [2]}, "row 0 .* goes on, but not by one token"),
    "going on without sampling": ({"starts": [CONTINUES], "counts": [1], "sampled_rows": []}, "row 0 .* goes on, but"),
    "limits of guesses for other rows": ({"max_drafts": [1, 1]}, "2 limits of drafts for 1 sampled rows"),
    "a longer guess than there can be": ({"max_drafts": [5]}, "drafts of 5 tokens; this executor guesses 0 to 4"),
    "a guess of less than nothing": ({"max_drafts": [-1]}, "drafts of -1"),
    "guesses without a block": ({"max_drafts": [4]}, "slot 0 may guess up to token 9, and has room for 8"),
    "more tokens with guesses": ({"counts": [9], "max_drafts": [4]}, "13 tokens, the limit is 12"),
    "tokens that are not known": ({"counts": [6]}, r"row 0 \(slot 0, tokens 0 to 5 of 5, 2 blocks\) computes .* known"),
    "tokens without a block": ({"num_new_blocks": [0], "new_block_ids": []}, "have no block"),
    "sample before the last known token": ({"counts": [4]}, "not the last known one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_plan_that_breaks_the_protocol_is_refused_by_name(slots: SlotTable, what: str) -> None:
    changes, message = WRONG[what]
    with pytest.raises(PlanError, match=f"step 7: .*{message}"):
        slots.apply(plan(**changes))


def test_a_row_beyond_the_longest_sequence_is_refused(slots: SlotTable) -> None:
    tokens = assignment(token_ids=int32s([1] * 16), num_prompt_tokens=16, block_ids=int32s(range(5)))
    slots.apply(plan(assigned=(tokens,), starts=[8], counts=[8], num_new_blocks=[0], new_block_ids=[]))
    slots.append_tokens(0, [1])
    with pytest.raises(PlanError, match="beyond 16 tokens"):
        slots.apply(plan(assigned=(), starts=[16], counts=[1], num_new_blocks=[0], new_block_ids=[]))
