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
from services.executor.rows import make_rows
from services.executor.sampler import Draw, Drawing
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

    @property
    def kv_cache_bytes(self) -> int:
        """What the cache takes when all of it is used."""
        return self._kv_cache.num_bytes

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
        sampled = self._compute(plan) if plan.slots else _Sampled()
        return StepResult(
            step_id=plan.step_id,
            token_ids=int32s(draw.token_id for draw in sampled.draws),
            logprobs=_logprobs(sampled.draws),
            failures=tuple(sampled.failures),
            duration_s=time.perf_counter() - started,
            num_tokens=int32s(sampled.num_tokens if any(sampled.num_drafted) else ()),
            num_drafted=int32s(sampled.num_drafted if any(sampled.num_drafted) else ()),
        )

    def _compute(self, plan: StepPlan) -> "_Sampled":
        """Run the model and draw.

        The slot of a failed row gets a token too: the next plan may be on its way already, and compute it.
        """
        rows = make_rows(self._slots, plan)
        sampled = _Sampled()
        with torch.inference_mode():
            logits = self._model(build_batch(self._slots, rows, self.capacity.block_size), self._kv_cache)
            drawing = Drawing(logits)
            first = 0
            for slot, num_drafted in zip(rows.slots[rows.sampled].tolist(), rows.num_drafted.tolist(), strict=True):
                draws = self._draw(drawing, first, slot, num_drafted)
                self._slots.append_tokens(slot, [draw.token_id for draw in draws])
                sampled.add(draws, num_drafted)
                first += num_drafted + 1
        return sampled

    def _draw(self, drawing: Drawing, first: int, slot: int, num_drafted: int) -> list[Draw]:
        """What a row has sampled: its next token, and as long as that was guessed, the one after it.

        A draw depends on logits, tokens and parameters alone, so each is what a step of its own would have drawn.
        """
        draws = []
        known = self._slots.num_tokens[slot]
        for number in range(num_drafted + 1):
            draw = drawing.draw(first + number, self._slots.choice(slot, number))
            draws.append(draw)
            if draw.failure is not None or number == num_drafted:
                break
            if draw.token_id != self._slots.token_ids[slot, known + number]:
                break
        return draws


class _Sampled:
    """What the rows of a step have sampled, in the plan's order."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self.failures: list[RowFailure] = []
        self.num_tokens: list[int] = []
        self.num_drafted: list[int] = []

    def add(self, draws: Sequence[Draw], num_drafted: int) -> None:
        """What the next row has."""
        if (reason := draws[-1].failure) is not None:
            self.failures.append(RowFailure(len(self.num_tokens), reason))
        self.draws += draws
        self.num_tokens.append(len(draws))
        self.num_drafted.append(num_drafted)


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
