"""The batch of a plan against one made the obvious way, token by token."""

import itertools
import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from services.executor.batch import ForwardBatch, build_batch
from services.executor.rows import make_rows
from services.executor.slots import SlotTable
from shared.ids import RequestId
from shared.messages import ExecutorCapacity, SlotAssignment, StepPlan, int32s
from shared.sampling import SamplingParams

BLOCK_SIZE, MAX_SLOTS, MAX_MODEL_LEN = 4, 6, 40


def fields(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name) for name in ForwardBatch.__dataclass_fields__}


@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=MAX_SLOTS),
    seed=st.integers(0, 1000),
)
def test_a_batch_is_what_its_rows_say(rows: list[tuple[int, int]], seed: int) -> None:
    chance = random.Random(seed)
    blocks = chance.sample(range(100), 60)
    slots = chance.sample(range(MAX_SLOTS), len(rows))
    tokens = [[chance.randrange(50) for _ in range(start + count)] for start, count in rows]
    tables = [[blocks.pop() for _ in range(-(-len(row) // BLOCK_SIZE))] for row in tokens]
    sampled = chance.sample(range(len(rows)), chance.randint(0, len(rows)))
    plan = StepPlan(
        step_id=1,
        assigned=tuple(
            SlotAssignment(slot, RequestId("req-1"), 0, int32s(row), 1, SamplingParams(seed=0), int32s(table))
            for slot, row, table in zip(slots, tokens, tables, strict=True)
        ),
        slots=int32s(slots),
        starts=int32s(start for start, _ in rows),
        counts=int32s(count for _, count in rows),
        num_new_blocks=int32s([0] * len(rows)),
        sampled_rows=int32s(sampled),
    )
    table = SlotTable(ExecutorCapacity("tiny", 100, BLOCK_SIZE, MAX_SLOTS, MAX_MODEL_LEN, 200), vocab_size=50)
    table.apply(plan)
    batch = build_batch(table, make_rows(table, plan), BLOCK_SIZE)

    positions = [range(start, start + count) for start, count in rows]
    ends = [sum(count for _, count in rows[: row + 1]) for row in range(len(rows))]
    assert batch.positions.tolist() == list(itertools.chain(*positions))
    assert batch.token_ids.tolist() == [row[p] for row, places in zip(tokens, positions, strict=True) for p in places]
    assert batch.slot_mapping.tolist() == [
        blocks_of_row[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for blocks_of_row, places in zip(tables, positions, strict=True)
        for p in places
    ]
    assert batch.query_starts.tolist() == [0, *ends]
    assert batch.context_lens.tolist() == [start + count for start, count in rows]
    assert batch.logits_rows.tolist() == [ends[row] - 1 for row in sampled]
    for row, blocks_of_row in enumerate(tables):
        assert batch.block_tables[row, : len(blocks_of_row)].tolist() == blocks_of_row
    assert {name: str(tensor.dtype) for name, tensor in fields(batch).items()} == {
        "token_ids": "torch.int64",
        "positions": "torch.int64",
        "slot_mapping": "torch.int64",
        "query_starts": "torch.int32",
        "context_lens": "torch.int32",
        "block_tables": "torch.int32",
        "logits_rows": "torch.int64",
    }
    assert all(tensor.is_contiguous() for tensor in fields(batch).values())


def test_a_batch_does_not_change_with_its_slots_afterwards() -> None:
    """The next plan may already change the slots while kernels still read this batch."""
    table = SlotTable(ExecutorCapacity("tiny", 10, BLOCK_SIZE, 2, MAX_MODEL_LEN, 20), vocab_size=50)
    assigned = SlotAssignment(0, RequestId("r"), 0, int32s([7, 8]), 2, SamplingParams(seed=0), int32s([5]))
    plan = StepPlan(
        1, assigned=(assigned,), slots=int32s([0]), starts=int32s([0]), counts=int32s([2]), num_new_blocks=int32s([0])
    )
    table.apply(plan)
    batch = build_batch(table, make_rows(table, plan), BLOCK_SIZE)
    before = {name: tensor.clone() for name, tensor in fields(batch).items()}
    table.token_ids[:] = 0
    table.block_ids[:] = 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in fields(batch).items())
