"""From a step plan to a step result: slots, batch, model, sampling. One call a step, in one thread.

Owns the order of things within a step. Does not own messages, threads, nor the epoch that a plan belongs to.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch
from msgspec.structs import replace

from services.executor.batch import build_batch
from services.executor.kernels.jit import use_threads
from services.executor.kv_cache import Cache
from services.executor.models.registry import Model
from services.executor.sampler import Draw, sample
from services.executor.slots import SlotTable
from shared.ids import RequestId
from shared.messages import ExecutorCapacity, RowFailure, SlotAssignment, StepPlan, StepResult, TokenLogprobs, int32s
from shared.sampling import SamplingParams

_NUM_WARM_UP_TOKENS: Final = 24
"""Enough for more than one block and for every kernel's whole and partial tiles."""


class ModelRunner:
    """A loaded model with its cache and slots, ready to run plans."""

    def __init__(
        self,
        model: Model,
        kv_cache: Cache,
        *,
        capacity: ExecutorCapacity,
        vocab_size: int,
        num_threads: int,
        device: str,
    ) -> None:
        """`num_threads` compute each step; `device` is for people."""
        self.capacity: Final = capacity
        self.device: Final = device
        self._num_threads = num_threads
        self._model = model
        self._kv_cache = kv_cache
        self._slots = SlotTable(capacity, vocab_size)

    def reset(self) -> None:
        """Empty every slot. What the blocks hold means nothing from now on."""
        self._slots.clear()

    def warm_up(self) -> None:
        """Run a prefill and a decode of every kind once, so that no request waits for what happens at first use.

        All slots are empty afterwards.
        """
        self.reset()
        drawn = SamplingParams(seed=0, top_k=4, top_p=0.9, presence_penalty=0.1, num_logprobs=1)
        for sampling in (SamplingParams(seed=0, temperature=0.0), drawn):
            for plan in _practice(self.capacity, sampling):
                self.run(plan)
            self.reset()

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one plan. Raises PlanError for one that breaks the protocol."""
        started = time.perf_counter()
        use_threads(self._num_threads)
        self._slots.apply(plan)
        self._kv_cache.copy_blocks(plan.copies)
        draws = self._compute(plan) if plan.slots else []
        return StepResult(
            step_id=plan.step_id,
            token_ids=int32s(draw.token_id for draw in draws),
            logprobs=_logprobs(draws),
            failures=tuple(RowFailure(row, draw.failure) for row, draw in enumerate(draws) if draw.failure is not None),
            duration_s=time.perf_counter() - started,
        )

    def _compute(self, plan: StepPlan) -> list[Draw]:
        """Run the model and draw.

        The slot of a failed row gets a token too: the next plan may be on its way already, and compute it.
        """
        sampled = [plan.slots[row] for row in plan.sampled_rows]
        with torch.inference_mode():
            logits = self._model(build_batch(self._slots, plan, self.capacity.block_size), self._kv_cache)
            draws = sample(logits, [self._slots.choice(slot) for slot in sampled])
        for slot, draw in zip(sampled, draws, strict=True):
            self._slots.append_token(slot, draw.token_id)
        return draws


def _logprobs(draws: Sequence[Draw]) -> tuple[TokenLogprobs | None, ...]:
    """One for each draw, or nothing if no row asked for any."""
    return tuple(draw.logprobs for draw in draws) if any(draw.logprobs is not None for draw in draws) else ()


def _practice(capacity: ExecutorCapacity, sampling: SamplingParams) -> Iterator[StepPlan]:
    """A prefill of one choice, and a decode."""
    num_tokens = min(_NUM_WARM_UP_TOKENS, capacity.max_model_len - 1, capacity.max_step_tokens)
    assignment = SlotAssignment(
        slot=0,
        request_id=RequestId("warm-up"),
        choice_index=0,
        token_ids=int32s([0] * num_tokens),
        num_prompt_tokens=num_tokens,
        sampling=sampling,
        block_ids=int32s(range(-(-(num_tokens + 1) // capacity.block_size))),
    )
    row = StepPlan(step_id=1, slots=int32s([0]), num_new_blocks=int32s([0]), sampled_rows=int32s([0]))
    yield replace(row, assigned=(assignment,), starts=int32s([0]), counts=int32s([num_tokens]))
    yield replace(row, starts=int32s([num_tokens]), counts=int32s([1]))
