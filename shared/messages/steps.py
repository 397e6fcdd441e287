"""Steps: scheduler ↔ executor.

A scheduler attaches to an executor and gets an epoch; every plan and result carries it, so that a scheduler that was
replaced, or one that was frozen and thaws, is refused. Plans are numbered 1, 2, 3, … within an epoch and executed in
that order, each once; a plan that arrives again is answered with the result it had.

A plan is complete: the executor never chooses. What a slot needs for its whole stay is sent once, when a choice is
assigned to it; afterwards only differences travel.

A sampling row may be allowed drafts: the executor guesses tokens from what the slot already says, computes them in the
same step, and keeps those that it would have sampled anyway. How many that were, the result says; until then a plan
that goes on with the slot cannot name its first token, and says `CONTINUES`.
"""

from typing import Final

from shared.ids import InstanceId, RequestId
from shared.messages.base import Int32Array, Message, int32s
from shared.messages.traces import TraceContext
from shared.sampling import SamplingParams

CONTINUES: Final = -1
"""A row's start that is wherever the slot stands: its last known token."""


class ExecutorCapacity(Message, frozen=True):
    """What one executor offers, fixed for its life."""

    model: str
    num_blocks: int
    block_size: int
    """Tokens of KV cache in a block."""
    max_slots: int
    """Choices that can run at once."""
    max_model_len: int
    """Tokens of prompt and output that one choice can have."""
    max_step_tokens: int
    """Tokens that one step can compute."""
    max_draft_tokens: int = 0
    """Tokens that it can guess ahead of a row's next one; 0: it guesses none."""

    @property
    def max_step_drafts(self) -> int:
        """Tokens that it can guess in one step, for all rows together."""
        return max(self.max_slots, self.max_draft_tokens) if self.max_draft_tokens else 0


class AttachExecutor(Message, frozen=True, tag="attach_executor"):
    """Scheduler → executor: I would plan your steps from now on."""

    scheduler_id: InstanceId


class ExecutorAttached(Message, frozen=True, tag="executor_attached"):
    """Executor → scheduler: you hold me; all slots and blocks are empty. Repeated for a scheduler that asks again."""

    executor_id: InstanceId
    epoch: int
    capacity: ExecutorCapacity


class AttachRefused(Message, frozen=True, tag="attach_refused"):
    """Executor → scheduler: `held_by` holds me and is alive, or I drain and `held_by` is None."""

    executor_id: InstanceId
    held_by: InstanceId | None


class DetachExecutor(Message, frozen=True, tag="detach_executor"):
    """Scheduler → executor: I plan no more steps in this epoch; another may attach at once."""

    scheduler_id: InstanceId
    epoch: int


class SlotAssignment(Message, frozen=True):
    """A choice takes a slot. `token_ids` are all its tokens so far, prompt first."""

    slot: int
    request_id: RequestId
    choice_index: int
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: Int32Array
    """Its block table so far; blocks for this step's tokens come on top with the row."""
    trace: TraceContext | None = None
    """Where in a trace the request belongs, without its `state`."""


class StepPlan(Message, frozen=True):
    """One forward pass. In order: release slots, assign slots, copy blocks, append blocks, compute rows, sample.

    Row `i` computes tokens `starts[i] … starts[i] + counts[i] - 1` of slot `slots[i]` and first appends
    `num_new_blocks[i]` ids, taken in turn from `new_block_ids`, to that slot's block table. A row that starts at
    `CONTINUES` has one token and samples.
    """

    step_id: int
    released: Int32Array = int32s()
    assigned: tuple[SlotAssignment, ...] = ()
    copies: Int32Array = int32s()
    """Whole blocks to copy, as pairs: source, destination, source, destination, …"""
    slots: Int32Array = int32s()
    starts: Int32Array = int32s()
    counts: Int32Array = int32s()
    num_new_blocks: Int32Array = int32s()
    new_block_ids: Int32Array = int32s()
    sampled_rows: Int32Array = int32s()
    """The rows whose last token is the last known one of their slot: they sample the next."""
    max_drafts: Int32Array = int32s()
    """For each of `sampled_rows`, how many tokens may be guessed after it; the block table reaches them. Empty: none.
    """


class RunStep(Message, frozen=True, tag="run_step"):
    """Scheduler → executor: run this plan."""

    epoch: int
    plan: StepPlan


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities at one output position, from the model's own distribution."""

    logprob: float
    """Of the sampled token."""
    top_token_ids: Int32Array = int32s()
    """The likeliest tokens, likeliest first."""
    top_logprobs: tuple[float, ...] = ()


class RowFailure(Message, frozen=True):
    """A sampled row that has no token: its logits were not numbers, or nothing was left to draw from."""

    row: int
    """Position in `sampled_rows`; the last of its token ids in the result means nothing."""
    reason: str


class StepResult(Message, frozen=True):
    """What one step sampled."""

    step_id: int
    token_ids: Int32Array
    """Those of each of the plan's `sampled_rows`, in that order."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """Empty if no row asked for any, else one for each of `token_ids`."""
    failures: tuple[RowFailure, ...] = ()
    duration_s: float = 0.0
    num_tokens: Int32Array = int32s()
    """How many each of `sampled_rows` has of `token_ids`: one, and one for each guess that was right. Empty: one each.
    """
    num_drafted: Int32Array = int32s()
    """How many tokens were guessed for each of them. Empty: none."""


class StepCompleted(Message, frozen=True, tag="step_completed"):
    """Executor → scheduler: the result of one step."""

    executor_id: InstanceId
    epoch: int
    result: StepResult


class StepsMissing(Message, frozen=True, tag="steps_missing"):
    """Executor → scheduler: a later plan arrived, but `next_step_id` did not; send again from there."""

    executor_id: InstanceId
    epoch: int
    next_step_id: int
