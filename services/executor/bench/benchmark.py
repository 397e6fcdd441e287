"""Loads a model as an executor does, and measures every kind of step that was asked for.

Memory is read before and after each kind of steps, and torch multiplies before: machines that share their processors
with others differ from one second to the next.
"""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from services.executor.bench.products import TorchProducts, weight_bytes
from services.executor.bench.reading import MemoryReader
from services.executor.bench.report import Benchmark, Measured
from services.executor.bench.steps import StepMeter, Work, decode, median_step, prefill
from services.executor.config import ExecutorConfig
from services.executor.factory import load_model
from services.executor.formats import Formats, choose_formats
from services.executor.kernels.vectors import dot_instruction
from services.executor.kv_cache import block_bytes
from services.executor.memory import free_bytes
from services.executor.models.integer import IntegerModel
from shared.errors import OperatorError
from shared.models.config import ModelConfig, load_config
from shared.models.units import counted, show_bytes

_MIN_TOKENS_OF_TORCH: Final = 8
"""With fewer, what counts is how fast weights are read."""
_MAX_SHARE_OF_FREE_MEMORY: Final = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """What to measure."""

    model: str
    folder: Path
    config: ExecutorConfig
    rows: Sequence[int]
    contexts: Sequence[int]
    chunks: Sequence[int]
    repeat: int


def run(order: Order, say: Callable[[str], None]) -> Benchmark:
    """Measure; `say` is told what happens. Raises OperatorError if the model cannot be had, or there is no room."""
    model_config = load_config(order.folder)
    formats = choose_formats(order.config, model_config, dot_instruction())
    works, config = _fit(order, model_config, formats, say)
    say(f"Loading {order.model} …")
    with contextlib.ExitStack() as stack:
        # As in an executor, steps are run by another thread than warms up, and that one stays alive: a lone pool of
        # OpenMP threads spins for milliseconds after each argmax, on the cores that the next step needs; two do not.
        other_thread = stack.enter_context(ThreadPoolExecutor(1))
        # Loading uses torch's threads, and those of two pools are slower: a handicap for what products compete with.
        loaded = load_model(order.folder, order.model, config)
        is_integer = isinstance(loaded.model, IntegerModel)
        num_bytes = weight_bytes(order.folder, model_config, formats.weights) if is_integer else None
        rivals = None if num_bytes is None else _Rivals(model_config, num_bytes, loaded.num_threads)
        if rivals is not None:
            stack.callback(rivals.close)
        meter = stack.enter_context(contextlib.closing(StepMeter(loaded)))
        other_thread.submit(meter.warm_up).result()
        meter.fill_cache(config.max_slots, max((work.context for work in works if work.is_decode), default=0))
        say(f"Measuring {counted(len(works), 'kind')} of steps …")
        measured = [_measure(work, meter, rivals, order.repeat) for work in works]
    return Benchmark(
        model=order.model,
        weights=formats.weights,
        kv_cache=formats.cache,
        num_threads=loaded.num_threads,
        repeat=order.repeat,
        weight_bytes=num_bytes,
        bytes_per_s=None if rivals is None else median(rivals.rates),
        measured=measured,
    )


class _Rivals:
    """What the products are compared with."""

    def __init__(self, config: ModelConfig, num_bytes: int, num_threads: int) -> None:
        self.rates: Final[list[float]] = []
        """Bytes a second, each time that memory was read."""
        self._num_bytes = num_bytes
        self._reader = MemoryReader(num_bytes, num_threads)
        self._torch = TorchProducts(config)
        # Whoever leads a team may be tied to a core for good, and what it starts later with it. So the reader has a
        # thread of its own, which starts now, before any other could be tied.
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(self._reader.seconds_per_byte).result()

    def reading_seconds(self) -> float:
        """To read as many bytes as the weights have."""
        seconds_per_byte = self._thread.submit(self._reader.seconds_per_byte).result()
        self.rates.append(1 / seconds_per_byte)
        return self._num_bytes * seconds_per_byte

    def torch_seconds(self, work: Work) -> float | None:
        """For the products of such a step; None if it has so few tokens that reading is what takes time."""
        return self._torch.seconds(work.num_tokens, work.rows) if work.num_tokens >= _MIN_TOKENS_OF_TORCH else None

    def close(self) -> None:
        """End the threads that read."""
        self._thread.shutdown()
        self._reader.close()


def _measure(work: Work, meter: StepMeter, rivals: _Rivals | None, repeat: int) -> Measured:
    """The median step, taken apart if there are rivals to compare its products with."""
    if rivals is None:
        return Measured(work, median(meter.whole_steps(work, repeat)))
    before, multiplying = rivals.reading_seconds(), rivals.torch_seconds(work)
    parts = median_step(meter.steps(work, repeat))
    return Measured(work, parts.whole, parts, (before + rivals.reading_seconds()) / 2, multiplying)


def _fit(
    order: Order, model: ModelConfig, formats: Formats, say: Callable[[str], None]
) -> tuple[list[Work], ExecutorConfig]:
    """The kinds of steps that there is room for, and settings of an executor that has it. Says what is left out.

    Raises OperatorError if nothing remains.
    """
    contexts = [context for context in order.contexts if context + order.repeat < model.max_model_len]
    chunks = [chunk for chunk in order.chunks if chunk < model.max_model_len]
    longest = max([*(context + order.repeat for context in contexts), *chunks], default=0) + 1
    row_bytes = -(-longest // order.config.block_size) * block_bytes(model, order.config.block_size, formats.cache)
    most_rows = int(free_bytes() * _MAX_SHARE_OF_FREE_MEMORY) // row_bytes
    rows = [number for number in order.rows if number <= most_rows]
    for what, asked, kept in (("contexts", order.contexts, contexts), ("chunks", order.chunks, chunks)):
        if left_out := sorted(set(asked) - set(kept)):
            say(f"Left out: {what} of {_listed(left_out)}; this model has room for {model.max_model_len} tokens")
    if left_out := sorted(set(order.rows) - set(rows)):
        size = show_bytes(row_bytes)
        say(f"Left out: {_listed(left_out)} rows; a sequence of {longest} tokens takes {size} of KV cache")
    works = [*(decode(number, context) for context in contexts for number in rows), *map(prefill, chunks)]
    if not works:
        raise OperatorError("there is no room for any of these steps")
    slots = max(rows, default=1)
    return works, replace(
        order.config,
        kv_cache_mb=-(-slots * row_bytes // (1 << 20)),
        max_slots=slots,
        max_step_tokens=max(order.config.max_step_tokens, slots, *chunks),
        max_model_len=longest,
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
