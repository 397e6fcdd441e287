"""A request's timeline for people: a line for each phase, with a bar where it was. Owns words, formats and colours."""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shared.messages import AttributeValue
from shared.models.units import counted
from shared.telemetry import names
from shared.telemetry.timeline import SpanBody, StepBody, StepsBody, Timeline

_MIN_BAR: Final = 12
"""Columns; where there is less room, there are no bars."""
_MAX_BAR: Final = 80
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_COLOURS: Final = {
    "tokenize": "cyan",
    "queue": "yellow",
    "prefill": "blue",
    "decode": "green",
    "detokenize": "cyan",
    "preempted": "red",
    "migration": "red",
    "resubmission": "red",
}
_IS_COMPUTED_AT: Final = ("prefill", "decode")
"""Phases that the scheduler tells of, and an executor works on."""


def picture_of(timeline: Timeline, width: int) -> RenderableType:
    """The whole picture, for a terminal of `width` columns."""
    lines: list[RenderableType] = [*_headline(timeline), Text(), _table(timeline, width)]
    for steps in timeline.steps:
        lines += [Text(), _summary(steps)]
        if not isinstance(steps.steps, msgspec.UnsetType):
            lines.append(_step_table(steps.steps))
    if remarks := list(_remarks(timeline)):
        lines += [Text(), *remarks]
    return Group(*lines)


def _headline(timeline: Timeline) -> Iterator[Text]:
    root = next((span for span in timeline.spans if names.OPERATION in span.attributes), timeline.spans[0])
    said = root.attributes
    outcome = "goes on" if root.duration_ms is None else str(said.get(names.OUTCOME, "ended"))
    how_long = "" if root.duration_ms is None else f" after {_ms(root.duration_ms)}"
    error = f": {said[names.ERROR_TYPE]}" if names.ERROR_TYPE in said else ""
    yield Text.assemble((root.name, "bold"), f" {outcome}{how_long}", (error, "red"))
    parts = []
    if names.INPUT_TOKENS in said:
        cached = f", {said[names.CACHED_TOKENS]} of them cached" if said.get(names.CACHED_TOKENS) else ""
        parts.append(f"{said[names.INPUT_TOKENS]} tokens in{cached}; {said[names.OUTPUT_TOKENS]} out")
    first = said.get(names.TIME_TO_FIRST_CHUNK)
    if isinstance(first, float):
        parts.append(f"first text after {_ms(first * 1000)}")
    if parts:
        yield Text("; ".join(parts))
    yield Text(f"{timeline.request_id}  trace {timeline.trace_id}  {timeline.started_at}", style="dim")


def _table(timeline: Timeline, width: int) -> Table:
    whats, wheres = [_what(span) for span in timeline.spans], _wheres(timeline)
    end_ms = _end_ms(timeline)
    widest = max(map(len, whats)) + max(map(len, wheres))
    room = min(_MAX_BAR, width - widest - len("  100000.0 ms  100000.0 ms      "))
    table = Table(box=None, pad_edge=False, header_style="dim")
    times = [
        (_ms(span.start_ms), "…" if span.duration_ms is None else _ms(span.duration_ms)) for span in timeline.spans
    ]
    for heading, column in (("at", [at for at, _ in times]), ("took", [took for _, took in times])):
        table.add_column(heading, justify="right", no_wrap=True, min_width=max(map(len, column)))
    table.add_column("what", overflow="fold")
    table.add_column("where", no_wrap=True, min_width=max(map(len, wheres)))
    if room >= _MIN_BAR:
        table.add_column(f"0 to {_ms(end_ms)}", no_wrap=True)
    for span, time, what, where in zip(timeline.spans, times, whats, wheres, strict=True):
        style = "red" if names.ERROR_TYPE in span.attributes else _COLOURS.get(span.name, "")
        bar = [Text(_bar(span, end_ms, room), style=style)] if room >= _MIN_BAR else []
        table.add_row(*time, what, where, *bar)
    return table


def _end_ms(timeline: Timeline) -> float:
    """The last moment that is known."""
    return max(0.001, *(span.start_ms + (span.duration_ms or 0.0) for span in timeline.spans))


def _bar(span: SpanBody, end_ms: float, width: int) -> str:
    """Blocks from the start of a span to its end, to an eighth of a column; at least one, however short it was."""
    duration_ms = end_ms - span.start_ms if span.duration_ms is None else span.duration_ms
    first = min(int(span.start_ms / end_ms * width), width - 1)
    eighths = max(1, round((span.start_ms + duration_ms) / end_ms * width * 8) - first * 8)
    whole, rest = divmod(eighths, 8)
    return " " * first + "█" * whole + (_EIGHTHS[rest] if rest else "")


def _what(span: SpanBody) -> str:
    said = span.attributes
    words = [] if span.parent_span_id is None or names.OPERATION in said else ["  "]
    attempt = said.get(names.ATTEMPT)
    again = f" (attempt {attempt})" if isinstance(attempt, int) and attempt > 1 else ""
    choice = f" of choice {said[names.CHOICE]}" if names.CHOICE in said else ""
    return "".join([*words, span.name, choice, _details(span.name, said), again, _trouble(said)])


def _details(name: str, said: Mapping[str, AttributeValue]) -> str:
    match name:
        case "tokenize" | "queue" if names.PROMPT_TOKENS in said:
            return f", {_tokens(said[names.PROMPT_TOKENS])}"
        case "prefill":
            start = said.get(names.CHUNK_START, 0)
            chunks = f" in {_steps(said[names.NUM_CHUNKS])}" if names.NUM_CHUNKS in said else ""
            return f", {_tokens(said[names.CHUNK_TOKENS])}" + (f" from {start}" if start else "") + chunks
        case "decode":
            right, drafts = said.get(names.DECODE_DRAFTS_RIGHT), said.get(names.DECODE_DRAFTS)
            guesses = f", {right} of {drafts} guesses right" if drafts else ""
            return f", {_tokens(said[names.DECODE_TOKENS])} in {_steps(said[names.DECODE_STEPS])}{guesses}"
        case "detokenize" if names.TEXT_TOKENS in said:
            return f", {_tokens(said[names.TEXT_TOKENS])}"
        case _:
            return ""


def _trouble(said: Mapping[str, AttributeValue]) -> str:
    if (error := said.get(names.ERROR_TYPE)) is not None:
        return f": {error}"
    return f": {said[names.REASON]}" if names.REASON in said else ""


def _steps(count: AttributeValue) -> str:
    return counted(count, "step") if isinstance(count, int) else ""


def _tokens(count: AttributeValue) -> str:
    return counted(count, "token") if isinstance(count, int) else ""


def _wheres(timeline: Timeline) -> list[str]:
    """Who worked on each phase."""
    known = {steps.instance_id: steps.instance for steps in timeline.steps}
    wheres = []
    for span in timeline.spans:
        executor_id = span.attributes.get(names.EXECUTOR) if span.name in _IS_COMPUTED_AT else None
        wheres.append(span.instance if executor_id is None else known.get(executor_id, str(executor_id)))  # type: ignore[call-overload]
    return wheres


def _summary(steps: StepsBody) -> Text:
    between = (
        f"; between them {_ms(steps.median_gap_ms)}, longest {_ms(steps.max_gap_ms)}" if steps.num_steps > 1 else ""
    )
    return Text(
        f"{counted(steps.num_steps, 'step')} on {steps.instance}: {_ms(steps.total_ms)} in all, median "
        f"{_ms(steps.median_ms)}, longest {_ms(steps.max_ms)}{between}"
    )


def _step_table(steps: list[StepBody]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "at", "took", "rows", "tokens", "guesses", "right"):
        table.add_column(heading, justify="right", no_wrap=True)
    for step in steps:
        numbers = (step.rows, step.tokens, step.drafts, step.drafts_right)
        table.add_row(str(step.step_id), _ms(step.start_ms), _ms(step.duration_ms), *map(str, numbers))
    return table


def _remarks(timeline: Timeline) -> Iterator[Text]:
    for instance_id in timeline.instances.silent:
        yield Text(f"{instance_id} did not answer in time: what it knows is missing", style="yellow")
    for instance_id in timeline.instances.gone:
        yield Text(f"{instance_id} is gone: what it knew is missing", style="yellow")
    if timeline.num_left_out:
        yield Text(f"{timeline.num_left_out} spans and steps were too many to be kept", style="yellow")


def _ms(value: float) -> str:
    """Such as `0.42 ms`, `17.3 ms` or `1,234 ms`."""
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms" if value < 1000 else f"{value:,.0f} ms"
