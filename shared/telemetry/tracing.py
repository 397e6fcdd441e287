"""What a service has to trace with: it begins traces, keeps finished spans for whoever asks, and has some exported.

Owns who is followed: every request while spans are kept, and those that are sampled while they are exported. Does not
own what spans say (`services/*/spans.py`). Where nothing is kept nor exported, nothing is made: requests then have no
context, and without one nobody makes spans.
"""

from collections.abc import Callable, Iterable
from random import Random
from typing import Final, Protocol

from shared.ids import RequestId
from shared.messages import Span, StepTaken, TraceContext
from shared.telemetry.metrics import Instrument, Kind, Reading
from shared.telemetry.store import SpanStore

_random: Final = Random()  # seeded by the operating system; ids of spans need not be secret
_TRACE_ID_BITS: Final = 128
_SPAN_ID_BITS: Final = 64
_RATIO_BITS: Final = 64

OpenSpans = Callable[[RequestId], Iterable[Span]]
"""The spans of a client request that go on."""
StepsOf = Callable[[RequestId], Iterable[StepTaken]]
"""The steps that a client request took part in."""


class Exporter(Protocol):
    """Takes spans away."""

    @property
    def num_dropped(self) -> int:
        """Spans that never arrived, since start: there was no room for them, or nobody took them."""
        ...

    def offer(self, span: Span) -> None:
        """Export a span some time. Never waits; counts the span as dropped if there is no room."""
        ...

    def close(self, within_s: float) -> None:
        """Export what waits, as far as the time reaches."""
        ...


def _no_steps(_request_id: RequestId) -> Iterable[StepTaken]:
    return ()


def new_span_id() -> bytes:
    """A fresh id of a span."""
    return (_random.getrandbits(_SPAN_ID_BITS) or 1).to_bytes(_SPAN_ID_BITS // 8)


def new_trace_id() -> bytes:
    """A fresh id of a trace."""
    return (_random.getrandbits(_TRACE_ID_BITS) or 1).to_bytes(_TRACE_ID_BITS // 8)


class Tracing:
    """The traces of one process."""

    def __init__(
        self, store: SpanStore | None = None, exporter: Exporter | None = None, *, sample_ratio: float = 0.0
    ) -> None:
        """`sample_ratio` is the share of traces that begin here and are to be exported."""
        self.store: Final = store or SpanStore(0)
        self.exporter: Final = exporter
        self.is_on: Final = bool(self.store.max_requests) or exporter is not None
        """Whether anything is followed here."""
        self.open_spans: list[OpenSpans] = []
        """Asked for what has not ended yet."""
        self.steps_of: StepsOf = _no_steps
        self._sampled_below = round(sample_ratio * 2**_RATIO_BITS)

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """Where a request that comes from outside belongs: in its client's trace, or at the top of one that begins.

        None if it is not followed at all. What a client has decided of sampling holds.
        """
        if not self.is_on:
            return None
        if parent is not None:
            return parent
        trace_id = new_trace_id()
        return TraceContext(trace_id, b"", int.from_bytes(trace_id[8:]) < self._sampled_below)

    def follows(self, context: TraceContext | None) -> bool:
        """Whether a request with this context is followed here."""
        return context is not None and (
            self.store.max_requests > 0 or (self.exporter is not None and context.is_sampled)
        )

    def record(self, span: Span, owner: str | None = None) -> None:
        """Take a span that is finished. `owner` is whose request it is, if that is known here."""
        self.store.add(span, owner)
        self.export(span)

    def export(self, span: Span) -> None:
        """Have a finished span exported, if its trace is to be, without keeping it."""
        if self.exporter is not None and span.context.is_sampled:
            self.exporter.offer(span)

    def instruments(self) -> list[Instrument]:
        """What can be measured of it: spans that were to be exported and were not."""
        return [
            Reading(
                "shoal.spans.dropped",
                Kind.COUNTER,
                "{span}",
                "Spans that never reached their collector",
                lambda: self.exporter.num_dropped if self.exporter is not None else 0,
            )
        ]

    def close(self, within_s: float) -> None:
        """Nothing more comes: have what waits exported, as far as the time reaches."""
        if self.exporter is not None:
            self.exporter.close(within_s)
