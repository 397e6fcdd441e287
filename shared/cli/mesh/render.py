"""A snapshot of a mesh as a table for people. Owns words, numbers' formats and colours."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shared.cli.mesh.view import ExecutorRow, InstanceRow, QueueRow, Snapshot
from shared.messages import (
    DetokenizerStatus,
    ExecutorStatus,
    ExecutorView,
    GatewayStatus,
    SchedulerStatus,
    TokenizerStatus,
)
from shared.models.units import counted

_STATE_COLOURS = {"up": "green", "draining": "yellow", "lost": "red"}
_MIN_LAST_COLUMN = 40
"""A narrower one would make a tall heap of words; then they go below the instance's name."""


def render(snapshot: Snapshot, width: int, *, is_connected: bool = True) -> RenderableType:
    """The whole picture, for a terminal of `width` columns."""
    first = headline(snapshot, is_connected=is_connected)
    if not snapshot.instances:
        return first
    names, models = ([len(text(row)) for row in snapshot.instances] for text in (lambda r: r.name, _models))
    has_room = width - max(names) - max(models) - len("  abcdef12  draining  30.0 s  ") >= _MIN_LAST_COLUMN
    return Group(first, Text(), _table(snapshot) if has_room else _list(snapshot), *_metrics(snapshot))


def _models(row: InstanceRow) -> str:
    return ", ".join(row.models) or "–"


def _metrics(snapshot: Snapshot) -> list[Text]:
    """Where metrics can be read, if anywhere."""
    shown = [f"{row.name} {row.metrics_address}" for row in snapshot.instances if row.metrics_address]
    return [Text(), Text(f"Metrics: {', '.join(shown)}", style="dim")] if shown else []


def _table(snapshot: Snapshot) -> Table:
    """A line for each instance."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("instance", "id", "state", "beat", "model"):
        table.add_column(heading, no_wrap=True)
    table.add_column("now")
    for row in snapshot.instances:
        table.add_row(
            row.name,
            Text(row.instance_id.rpartition("-")[2], style="dim"),
            Text(row.state, style=_STATE_COLOURS[row.state]),
            f"{row.age_s:.1f} s",
            _models(row),
            _doing(row, snapshot),
        )
    return table


def _list(snapshot: Snapshot) -> Group:
    """What each instance does below its name, where there is no room beside it."""
    lines: list[RenderableType] = []
    for row in snapshot.instances:
        state = Text(row.state, style=_STATE_COLOURS[row.state])
        lines.append(Text("  ").join([Text(row.name), state, Text(_models(row))]))
        lines.append(Padding(Text(_doing(row, snapshot), style="dim"), (0, 0, 0, 2)))
    return Group(*lines)


def _doing(row: InstanceRow, snapshot: Snapshot) -> str:
    return "" if row.state == "lost" else doing(row, snapshot)


def headline(snapshot: Snapshot, *, is_connected: bool = True) -> Text:
    """Whether the mesh can serve, in a sentence."""
    if not is_connected:
        return Text("NATS cannot be reached at this moment; what follows is old.", style="red")
    if not snapshot.instances:
        return Text("Nobody is there: no instance of Shoal beats on this NATS server.", style="red")
    if not snapshot.missing:
        return Text("Cannot serve: no instance has a model yet.", style="red")
    served = [model for model, services in snapshot.missing.items() if not services]
    lines = [f"Serves {', '.join(served)}."] if served else []
    for model, services in snapshot.missing.items():
        if services:
            lines.append(f"Cannot serve {model}: there is no {' and no '.join(services)} that takes work.")
    return Text(" ".join(lines), style="green" if served else "red")


def doing(row: InstanceRow, snapshot: Snapshot) -> str:
    """What an instance does, in a few words."""
    match row.status:
        case GatewayStatus() as status:
            words = [
                ", ".join(
                    (
                        f"{status.num_open_requests} open",
                        f"{status.num_requests} so far",
                        *([f"{status.num_refused} refused"] if status.num_refused else []),
                        *([f"{status.num_failed} failed"] if status.num_failed else []),
                        counted(status.num_connections, "connection"),
                    )
                ),
                status.address,
            ]
        case TokenizerStatus() as status:
            words = [f"{counted(status.num_requests, 'prompt')}, {counted(status.num_tokens, 'token')} so far"]
        case SchedulerStatus():
            words = _queue(next(queue for queue in snapshot.queues if queue.instance_id == row.instance_id))
        case ExecutorStatus():
            words = _executor(
                next(executor for executor in snapshot.executors if executor.instance_id == row.instance_id)
            )
        case DetokenizerStatus() as status:
            words = [f"{counted(status.num_open_choices, 'open choice')}, {counted(status.num_tokens, 'token')} so far"]
        case _:
            words = []
    if row.num_dropped_messages:
        words.append(f"{counted(row.num_dropped_messages, 'message')} dropped")
    return " · ".join(word for word in words if word)


def _queue(queue: QueueRow) -> list[str]:
    words = [f"{queue.num_waiting} waiting, {queue.num_running} running"]
    if queue.output_tokens_per_s is not None:
        words.append(f"{queue.output_tokens_per_s:.0f} tokens/s out")
    if queue.cache_hit_share is not None:
        words.append(f"{queue.cache_hit_share:.0%} of prompt tokens from cache")
    if queue.num_preemptions:
        words.append(counted(queue.num_preemptions, "preemption"))
    return words


def _executor(executor: ExecutorRow) -> list[str]:
    words = [executor.device, f"held by {executor.held_by}" if executor.held_by else "held by nobody"]
    if executor.busy_share is not None:
        words.append(f"busy {executor.busy_share:.0%}")
    if executor.computed_tokens_per_s is not None:
        words.append(f"{executor.computed_tokens_per_s:.0f} tokens/s computed")
    if executor.guessed_right_share is not None:
        words.append(f"{executor.guessed_right_share:.0%} of guesses right")
    if executor.blocks is not None:
        words += _blocks(executor.blocks)
    return words


def _blocks(blocks: ExecutorView) -> list[str]:
    """What an executor's blocks hold, and how fast what they held is lost to others."""
    held = f"{blocks.num_cached_blocks} cached, {blocks.num_pinned_blocks} pinned"
    words = [f"blocks {blocks.num_free_blocks} free of {blocks.num_blocks}, {held}"]
    if blocks.num_evicted_blocks:
        age = f"{blocks.eviction_age_s:.0f} s of work after they were used"
        words.append(f"{counted(blocks.num_evicted_blocks, 'block')} evicted, {age}")
    return words
