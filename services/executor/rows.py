"""The rows of one step as they are computed: a plan's, with the place of those that go on and the guesses of drafts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.executor.kernels.draft import guess
from services.executor.slots import SlotTable
from shared.messages import CONTINUES, StepPlan


@dataclass(frozen=True, slots=True)
class Rows:
    """R rows, of which S sample."""

    slots: npt.NDArray[np.int64]
    """[R]."""
    starts: npt.NDArray[np.int64]
    """[R]: the position of a row's first token."""
    counts: npt.NDArray[np.int64]
    """[R]: its tokens, guesses included."""
    sampled: npt.NDArray[np.int64]
    """[S]: the rows that sample."""
    num_drafted: npt.NDArray[np.int32]
    """[S]: how many of a row's tokens, the last ones, are guesses."""


def make_rows(slots: SlotTable, plan: StepPlan) -> Rows:
    """The rows of a plan that `slots` has taken in. What is guessed is written behind a slot's known tokens."""
    row_slots, starts, counts, sampled = (
        np.array(numbers, np.int64) for numbers in (plan.slots, plan.starts, plan.counts, plan.sampled_rows)
    )
    goes_on = starts == CONTINUES
    if goes_on.any():
        starts[goes_on] = slots.num_tokens[row_slots[goes_on]] - 1
    num_drafted = np.zeros(len(sampled), np.int32)
    if plan.max_drafts:
        sampled_slots = row_slots[sampled].astype(np.int32)
        num_drafted = guess(slots.token_ids, slots.num_tokens, sampled_slots, np.array(plan.max_drafts, np.int32))
        counts[sampled] += num_drafted
    return Rows(row_slots, starts, counts, sampled, num_drafted)
