"""What a replay found, as text for people and as JSON for programs."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from services.scheduler.recording.answers import Answer, Planned
from services.scheduler.recording.calls import Call
from services.scheduler.recording.records import Header
from services.scheduler.replay.player import Broken, Crash, Difference, differing_fields
from services.scheduler.replay.queues import ChoiceView, Queues
from services.scheduler.replay.summary import Summary
from services.scheduler.replay.timeline import Entry

_MAX_SHOWN = 200


class Report(msgspec.Struct):
    """Everything that a replay can tell."""

    header: Header
    replayed_by: str
    """The version of Shoal."""
    summary: Summary
    ending: str | None
    """How the recording ends; None if it was not played to its end."""
    problem: Difference | Broken | None = None
    crashes: list[Crash] = []
    request_id: str | None = None
    timeline: list[Entry] = []
    stopped_before: int | None = None
    queues: Queues | None = None

    @property
    def is_same(self) -> bool:
        """Whether everything came out as recorded."""
        return self.problem is None


def as_json(report: Report) -> str:
    """One JSON object."""
    fields: dict[str, Any] = {
        "scheduler_id": report.header.scheduler_id,
        "recorded_at": report.header.started_at,
        "recorded_by": report.header.shoal_version,
        "replayed_by": report.replayed_by,
        "is_same": report.is_same,
        "ending": report.ending,
        "summary": report.summary,
        "problem": _problem_fields(report.problem),
        "crashes": [crash._asdict() for crash in report.crashes],
    }
    if report.request_id is not None:
        fields |= {"request_id": report.request_id, "timeline": report.timeline}
    if report.stopped_before is not None:
        fields |= {"stopped_before": report.stopped_before, "queues": report.queues}
    return msgspec.json.encode(fields).decode()


def as_text(report: Report) -> Iterator[str]:
    """Lines."""
    header, summary = report.header, report.summary
    moment = datetime.fromtimestamp(header.started_at, UTC)
    yield f"{header.scheduler_id}, recorded from {moment:%Y-%m-%d %H:%M:%S} UTC by shoal {header.shoal_version}"
    yield f"  played       {summary.num_records} records, {summary.span_s:.3f} s"
    yield (
        f"  requests     {summary.num_requests}: {summary.num_completed} completed, {summary.num_cancelled} cancelled, "
        f"{summary.num_failed} failed, {summary.num_open} open; {summary.num_refused} more refused"
    )
    yield (
        f"  steps        {summary.num_steps}: {summary.num_computed_tokens} tokens computed, "
        f"{summary.num_output_tokens} of output; {summary.num_preemptions} preemptions"
    )
    yield f"  executors    {summary.num_executors} attached, {summary.num_executors_died} died"
    if summary.num_pins:
        yield f"  pins         {summary.num_pins}"
    if report.ending is not None:
        yield f"  end          {report.ending}"
    if report.request_id is not None:
        yield from _timeline_lines(report.request_id, report.timeline)
    if report.queues is not None and report.stopped_before is not None:
        yield from _queue_lines(report.stopped_before, report.queues)
    for crash in report.crashes:
        yield f"\nRecord {crash.number} raises what the core should never raise:"
        yield crash.trace.rstrip()
    yield from _verdict_lines(report)


def _verdict_lines(report: Report) -> Iterator[str]:
    match report.problem:
        case None:
            yield "\nEverything came out as recorded."
        case Difference() as difference:
            record = difference.record
            yield f"\nRecord {difference.number}, at {record.at:.3f} s, differs: {show(record.call)}"
            yield f"  recorded   {show(record.answer)}"
            yield f"  came out   {show(difference.came_out)}"
            for name, recorded, came_out in differing_fields(record.answer, difference.came_out):
                yield f"  {name}: {recorded} recorded, {came_out} came out"
            if report.header.shoal_version != report.replayed_by:
                yield (
                    f"It was recorded by shoal {report.header.shoal_version} and replayed by {report.replayed_by}, "
                    f"which may decide otherwise."
                )
        case Broken() as broken:
            yield f"\nAfter record {broken.number}, {show(broken.record.call)}, the core contradicts itself:"
            yield f"  {broken.what}"


def _timeline_lines(request_id: str, entries: list[Entry]) -> Iterator[str]:
    yield f"\n{request_id}"
    if not entries:
        yield "  is not in the part that was played"
    for entry in entries:
        where = f" [{entry.executor_id}]" if entry.executor_id else ""
        yield f"  {entry.at:10.3f} s  #{entry.number:<8}{entry.text}{where}"


def _queue_lines(number: int, queues: Queues) -> Iterator[str]:
    yield f"\nBefore record {number}:"
    for executor in queues.executors:
        yield (
            f"  {executor.executor_id} ({executor.model}): {executor.num_free_blocks} of {executor.num_blocks} blocks "
            f"are free, {executor.num_cached_blocks} can be found, {executor.num_pinned_blocks} are pinned"
        )
        yield from _choice_lines("running", executor.running)
        yield from _choice_lines("waiting", executor.waiting)
    yield "  lobby"
    yield from _choice_lines("waiting", queues.lobby)


def _choice_lines(what: str, choices: list[ChoiceView]) -> Iterator[str]:
    yield f"    {what}: {len(choices)}"
    for choice in choices:
        name = f"{choice.request_id}/{choice.index}"
        place = "" if choice.slot is None else f" in slot {choice.slot} with {choice.num_blocks} blocks"
        yield (
            f"      {name}  {choice.state}{place}, {choice.num_computed_tokens} of {choice.num_known_tokens} tokens "
            f"computed, {choice.num_in_flight} in flight; priority {choice.priority}, tenant {choice.tenant!r}"
        )


def show(what: Call | Answer) -> str:
    """A call or an answer in one line, long values shortened."""
    if what is None:
        return "nothing"
    name = what.__struct_config__.tag
    fields = [f"{field}={_show(getattr(what, field))}" for field in what.__struct_fields__ if field != "plan"]
    return f"{name} {', '.join(fields)}"


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} …"


def _problem_fields(problem: Difference | Broken | None) -> dict[str, Any] | None:
    match problem:
        case None:
            return None
        case Difference():
            differences = differing_fields(problem.record.answer, problem.came_out)
            return {
                "kind": "difference",
                "record": problem.number,
                "at": problem.record.at,
                "call": show(problem.record.call),
                "recorded": show(problem.record.answer),
                "came_out": show(problem.came_out),
                "fields": [dict(zip(("name", "recorded", "came_out"), row, strict=True)) for row in differences],
                "has_plan": isinstance(problem.record.answer, Planned) and problem.record.answer.plan is not None,
            }
        case Broken():
            return {
                "kind": "invariant",
                "record": problem.number,
                "at": problem.record.at,
                "call": show(problem.record.call),
                "what": problem.what,
            }
