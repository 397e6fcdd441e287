"""What was measured, as a table for people or as JSON for programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from services.executor.bench.steps import Parts, Work
from shared.models.units import counted, show_bytes

_HEADINGS = (
    *("step", "tokens", "step ms", "products ms", "floor", "int_mm"),
    *("products", "attention", "norms", "cache", "sampling", "Python"),
)
_NUM_OF_WHOLE_STEPS = 3
"""How many of them a step has that is not taken apart."""
_LEGEND = """\
products ms: all matrix products of the step. floor: the time in which as many bytes as the weights have can be read,
divided by the products' (1.00: few tokens cannot be faster). int_mm: torch._int_mm's time for products of the same
shapes, divided by theirs (over 1.00: faster than torch); of more than half a second, it is that of some layers, scaled
up. The rest are shares of the step. norms: embedding, norms, numbers made bytes; cache: rotary embedding, writing keys
and values; Python: slots, batch, inputs, result.
What the broker and the other services add: shoal bench mesh."""
_LEGEND_OF_WHOLE_STEPS = """\
Steps in this format cannot be taken apart. What the broker and the other services add: shoal bench mesh."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of step. Times are seconds."""

    work: Work
    whole: float
    parts: Parts | None = None
    """None if the model's steps cannot be taken apart."""
    floor: float | None = None
    """To read the weights of all products."""
    int_mm: float | None = None
    """The same products by torch, for enough tokens."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """All kinds of steps of one model."""

    model: str
    weights: str
    kv_cache: str
    num_threads: int
    repeat: int
    weight_bytes: int | None
    bytes_per_s: float | None
    """Of reading memory, the median over all kinds of steps."""
    measured: Sequence[Measured]


def as_json(benchmark: Benchmark) -> dict[str, Any]:
    """The benchmark in numbers and strings; times are milliseconds."""
    return {
        "model": benchmark.model,
        "weights": benchmark.weights,
        "kv_cache": benchmark.kv_cache,
        "threads": benchmark.num_threads,
        "repeat": benchmark.repeat,
        "weight_bytes": benchmark.weight_bytes,
        "read_gb_per_s": None if benchmark.bytes_per_s is None else round(benchmark.bytes_per_s / 1e9, 2),
        "steps": [_step_as_json(measured) for measured in benchmark.measured],
    }


def as_lines(benchmark: Benchmark) -> Iterator[str]:
    """The benchmark for people, at most 120 characters a line."""
    yield (
        f"{benchmark.model}: weights {benchmark.weights}, KV cache {benchmark.kv_cache}, "
        f"{counted(benchmark.num_threads, 'thread')}; of {counted(benchmark.repeat, 'step')} of each kind, the median"
    )
    if benchmark.weight_bytes is not None and benchmark.bytes_per_s is not None:
        reading_ms = benchmark.weight_bytes / benchmark.bytes_per_s * 1e3
        yield (
            f"A step's products read {show_bytes(benchmark.weight_bytes)} of weights. "
            f"Reading as much takes {reading_ms:.2f} ms: {benchmark.bytes_per_s / 1e9:.1f} GB/s"
        )
    yield ""
    is_apart = any(measured.parts is not None for measured in benchmark.measured)
    headings = _HEADINGS if is_apart else _HEADINGS[:_NUM_OF_WHOLE_STEPS]
    yield from _aligned([headings, *(_row(measured) for measured in benchmark.measured)])
    yield ""
    yield from (_LEGEND if is_apart else _LEGEND_OF_WHOLE_STEPS).splitlines()


def _step_as_json(measured: Measured) -> dict[str, Any]:
    work, parts = measured.work, measured.parts
    step: dict[str, Any] = {
        "kind": "decode" if work.is_decode else "prefill",
        "rows": work.rows,
        "tokens": work.num_tokens,
        "context": work.context,
        "step_ms": _ms(measured.whole),
    }
    if parts is None:
        return step
    shares = {field.name: round(getattr(parts, field.name) / parts.whole, 4) for field in fields(parts)}
    step |= {"products_ms": _ms(parts.products), "shares": shares}
    if measured.floor is not None:
        step |= {"floor_ms": _ms(measured.floor), "floor_ratio": round(measured.floor / parts.products, 3)}
    if measured.int_mm is not None:
        step |= {"int_mm_ms": _ms(measured.int_mm), "int_mm_ratio": round(measured.int_mm / parts.products, 3)}
    return step


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _row(measured: Measured) -> tuple[str, ...]:
    work, parts = measured.work, measured.parts
    kind = f"decode at {work.context}" if work.is_decode else "prefill"
    first = (kind, str(work.num_tokens), f"{measured.whole * 1e3:.2f}")
    if parts is None:
        return first
    floor, int_mm = (
        "" if seconds is None else f"{seconds / parts.products:.2f}" for seconds in (measured.floor, measured.int_mm)
    )
    shares = (f"{getattr(parts, field.name) / parts.whole:.1%}" for field in fields(parts))
    return (*first, f"{parts.products * 1e3:.2f}", floor, int_mm, *shares)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join((row[0].ljust(len(first)), *others)).rstrip()
