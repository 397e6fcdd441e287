"""Steps as a scheduler would plan them, carried out by a `ModelRunner`, and their time taken apart.

Owns plans, and which part of a step's time is whose. Does not own what the parts are compared with.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.factory import LoadedModel
from services.executor.model_runner import ModelRunner
from services.executor.models.integer import IntegerModel
from services.executor.sampler import Drawing
from services.executor.slots import Choice
from shared.ids import RequestId
from shared.messages import SlotAssignment, StepPlan, int32s
from shared.sampling import SamplingParams

PRODUCTS: Final = ("qkv", "output", "gate and up", "down", "head")
"""The kinds of phases that are matrix products."""

_GREEDY: Final = SamplingParams(seed=0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What a kind of step computes: a token of each of `rows` sequences, or a chunk of one."""

    rows: int
    chunk: int
    """Tokens of a row."""
    context: int
    """Tokens that a row's last one sees in the first step, itself included."""

    @property
    def is_decode(self) -> bool:
        """Whether each step goes on where the last one ended."""
        return self.chunk == 1

    @property
    def num_tokens(self) -> int:
        """In a step."""
        return self.rows * self.chunk


def decode(rows: int, context: int) -> Work:
    """One token of each of so many sequences that have so many."""
    return Work(rows, 1, context)


def prefill(chunk: int) -> Work:
    """The first tokens of one sequence."""
    return Work(1, chunk, chunk)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of one step went, in seconds. The parts add up to the whole."""

    products: float
    attention: float
    norms: float
    """Embedding, norms, and numbers made bytes."""
    cache: float
    """Rotary embedding, and writing into the KV cache."""
    sampling: float
    python: float
    """Everything between: slots, batch, the model's inputs, the result."""

    @property
    def whole(self) -> float:
        """The step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def median_step(steps: Sequence[Parts]) -> Parts:
    """The one that took the median time; the lower one of two. Medians of each part would not add up to a step."""
    return sorted(steps, key=lambda parts: parts.whole)[(len(steps) - 1) // 2]


class StepMeter:
    """A loaded model in a runner, with a clock at each of its seams."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._block_size = loaded.capacity.block_size
        self._max_blocks = -(-loaded.capacity.max_model_len // self._block_size)
        self._model = _TimedModel(loaded)
        self._tokens = np.random.default_rng(0).integers(
            loaded.config.vocab_size, size=loaded.capacity.max_model_len, dtype=np.int32
        )
        self._runner = ModelRunner(
            self._model,
            loaded.kv_cache,
            capacity=loaded.capacity,
            vocab_size=loaded.config.vocab_size,
            num_threads=loaded.num_threads,
            device="cpu",
        )

    def warm_up(self) -> None:
        """Compile and run everything once."""
        self._runner.warm_up()

    def fill_cache(self, num_rows: int, num_tokens: int) -> None:
        """Give each of so many sequences keys and values of so many tokens: computed once, then copied.

        Memory that was never written would be read faster than any that was.
        """
        chunk = self._loaded.capacity.max_step_tokens
        assignment = self._assignment(0, num_tokens)
        self._runner.reset()
        for start in range(0, num_tokens, chunk):
            count = min(chunk, num_tokens - start)
            assigned = (assignment,) if start == 0 else ()
            self._runner.run(_plan([0], [start], [count], assigned=assigned, sampled_rows=int32s()))
        used = range(-(-num_tokens // self._block_size))
        for slot in range(1, num_rows):
            pairs = [block for number in used for block in (number, self._blocks(slot)[number])]
            self._loaded.kv_cache.copy_blocks(pairs)

    def whole_steps(self, work: Work, repeat: int) -> list[float]:
        """The seconds that each of `repeat` steps takes; one more went before them."""
        return [self._run(plan, work)[0] for plan in self._plans(work, repeat + 1)][1:]

    def steps(self, work: Work, repeat: int) -> list[Parts]:
        """The same, each step with its parts. For integer models alone."""
        return [self._parts(*self._run(plan, work)) for plan in self._plans(work, repeat + 1)][1:]

    def close(self) -> None:
        """End the model's threads."""
        self._model.close()

    def _run(self, plan: StepPlan, work: Work) -> tuple[float, float]:
        """Seconds of the step, and of drawing its tokens once more."""
        duration_s = self._runner.run(plan).duration_s
        choices = [Choice(RequestId("bench"), 0, _GREEDY, work.context, self._tokens[: work.context])] * work.rows
        started = time.perf_counter()
        drawing = Drawing(self._model.logits)
        for row, choice in enumerate(choices):
            drawing.draw(row, choice)
        return duration_s, time.perf_counter() - started

    def _parts(self, whole: float, sampling: float) -> Parts:
        compiled, shares = self._model.take_compiled()
        seconds = {kind: share * compiled for kind, share in shares.items()}
        sampling = min(sampling, whole - compiled)
        return Parts(
            products=sum(seconds.pop(kind) for kind in PRODUCTS),
            attention=seconds.pop("attention"),
            cache=seconds.pop("cache"),
            norms=sum(seconds.values()),
            sampling=sampling,
            python=whole - compiled - sampling,
        )

    def _plans(self, work: Work, number: int) -> Iterator[StepPlan]:
        """Decode goes on by a token a step; a prefill comes again and again, each time as a new request."""
        self._runner.reset()
        slots = range(work.rows)
        assigned = tuple(self._assignment(slot, work.context) for slot in slots)
        for step in range(number):
            if not work.is_decode:
                released = int32s(slots) if step else int32s()
                yield _plan(slots, [0] * work.rows, [work.chunk] * work.rows, assigned=assigned, released=released)
            else:
                starts = [work.context - 1 + step] * work.rows
                yield _plan(slots, starts, [1] * work.rows, assigned=() if step else assigned)

    def _assignment(self, slot: int, num_tokens: int) -> SlotAssignment:
        return SlotAssignment(
            slot=slot,
            request_id=RequestId(f"bench-{slot}"),
            choice_index=0,
            token_ids=int32s(self._tokens[:num_tokens].tolist()),
            num_prompt_tokens=num_tokens,
            sampling=_GREEDY,
            block_ids=int32s(self._blocks(slot)),
        )

    def _blocks(self, slot: int) -> range:
        return range(slot * self._max_blocks, (slot + 1) * self._max_blocks)


def _plan(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], **more: Any) -> StepPlan:
    """Rows that need no new blocks; all of them sample unless `more` says otherwise."""
    rows = {"sampled_rows": int32s(range(len(slots)))} | more
    none = int32s([0] * len(slots))
    return StepPlan(
        step_id=1, slots=int32s(slots), starts=int32s(starts), counts=int32s(counts), num_new_blocks=none, **rows
    )


class _TimedModel:
    """A model that keeps its last logits, and knows how long its compiled calls took."""

    logits: Tensor

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def __call__(self, batch: ForwardBatch, kv_cache: Any) -> Tensor:
        """What the model says."""
        self.logits = self._model(batch, kv_cache)
        return self.logits

    def take_compiled(self) -> tuple[float, dict[str, float]]:
        """Seconds of the last compiled call, and the share of each kind of phase in it."""
        assert isinstance(self._model, IntegerModel)
        return self._model.seconds, self._model.take_shares()

    def close(self) -> None:
        """End its threads."""
        if isinstance(self._model, IntegerModel):
            self._model.close()
