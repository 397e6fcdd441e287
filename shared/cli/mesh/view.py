"""A mesh as its beats show it: who is there, how busy, how fast. Pure: beats and time in, rows and sums out."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.clock import Clock
from shared.ids import InstanceId, Service
from shared.messages import ExecutorStatus, ExecutorView, Presence, SchedulerStatus
from shared.presence import Directory

_SHOW_LOST_S = 30.0
_RATE_WINDOW_S = 3.0


class InstanceRow(msgspec.Struct, frozen=True):
    """One instance."""

    service: Service
    name: str
    instance_id: InstanceId
    state: str
    """up, draining or lost."""
    age_s: float
    """Since its last beat."""
    models: tuple[str, ...]
    num_dropped_messages: int
    status: msgspec.Struct
    metrics_address: str


class QueueRow(msgspec.Struct, frozen=True):
    """What one scheduler has to do."""

    name: str
    instance_id: InstanceId
    num_waiting: int
    num_running: int
    output_tokens_per_s: float | None
    """None until two beats were heard."""
    cache_hit_share: float | None
    """Of the prompt tokens so far, those found in the prefix cache; None if there were none."""
    num_preemptions: int


class ExecutorRow(msgspec.Struct, frozen=True):
    """One executor, as itself and as its scheduler see it."""

    name: str
    instance_id: InstanceId
    device: str
    held_by: str | None
    busy_share: float | None
    """Of the time between beats, spent inside steps."""
    computed_tokens_per_s: float | None
    guessed_right_share: float | None
    """Of the tokens guessed ahead so far, those that were right; None if there were none."""
    blocks: ExecutorView | None


class Snapshot(msgspec.Struct, frozen=True):
    """Everything at one moment."""

    can_serve: bool
    missing: dict[str, tuple[Service, ...]]
    """For each model, the services of which none takes work; a gateway counts for every model."""
    instances: tuple[InstanceRow, ...]
    queues: tuple[QueueRow, ...]
    executors: tuple[ExecutorRow, ...]
    num_dropped_messages: int


def encode_json(snapshot: Snapshot) -> bytes:
    """The snapshot as a JSON object, down to the last status."""
    return msgspec.json.encode(_as_objects(snapshot))


def _as_objects(value: Any) -> Any:
    """Messages are arrays on the wire; here they are objects with names."""
    if isinstance(value, msgspec.Struct):
        return {name: _as_objects(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [_as_objects(item) for item in value]
    return value


@dataclass(frozen=True, slots=True)
class _Heard:
    at: float
    beat: Presence


class MeshView:
    """Takes in beats and keeps what can be said of the mesh."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._directory = Directory(clock)
        self._heard: dict[InstanceId, deque[_Heard]] = {}
        self._lost: dict[InstanceId, _Heard] = {}

    def observe(self, beat: Presence) -> None:
        """Take in one beat."""
        self._directory.observe(beat)
        self._lost.pop(beat.instance_id, None)
        if beat.is_leaving:
            history = self._heard.pop(beat.instance_id, None)
            if beat.has_died and history:
                self._lost[beat.instance_id] = history[-1]
            return
        history = self._heard.setdefault(beat.instance_id, deque())
        history.append(_Heard(self._clock.now(), beat))
        while len(history) > 2 and history[-1].at - history[0].at > _RATE_WINDOW_S:
            history.popleft()

    def tick(self) -> None:
        """Notice who has fallen silent. Call it at least once a second, while the broker can be reached."""
        now = self._clock.now()
        for beat in self._directory.expire():
            self._lost[beat.instance_id] = self._heard.pop(beat.instance_id)[-1]
        self._lost = {instance: last for instance, last in self._lost.items() if now - last.at < _SHOW_LOST_S}

    def snapshot(self) -> Snapshot:
        """How the mesh is now."""
        alive = [history[-1] for history in self._heard.values()]
        rows = [self._instance_row(heard, is_lost=False) for heard in alive]
        rows += [self._instance_row(heard, is_lost=True) for heard in self._lost.values()]
        rows.sort(key=lambda row: (list(Service).index(row.service), row.name, row.instance_id))
        beats = sorted((heard.beat for heard in alive), key=lambda beat: (beat.name, beat.instance_id))
        missing = self._missing()
        return Snapshot(
            can_serve=any(not services for services in missing.values()),
            missing=missing,
            instances=tuple(rows),
            queues=tuple(filter(None, map(self._queue_row, beats))),
            executors=tuple(filter(None, map(self._executor_row, beats))),
            num_dropped_messages=sum(beat.num_dropped_messages for beat in beats),
        )

    def _missing(self) -> dict[str, tuple[Service, ...]]:
        models = {model for history in self._heard.values() for model in history[-1].beat.models}
        gateway = () if self._directory.available(Service.GATEWAY) else (Service.GATEWAY,)
        return {
            model: gateway + tuple(s for s, count in self._directory.num_available(model).items() if not count)
            for model in sorted(models)
        }

    def _instance_row(self, heard: _Heard, *, is_lost: bool) -> InstanceRow:
        beat = heard.beat
        return InstanceRow(
            service=beat.service,
            name=beat.name,
            instance_id=beat.instance_id,
            state="lost" if is_lost else "draining" if beat.is_draining else "up",
            age_s=round(self._clock.now() - heard.at, 2),
            models=beat.models,
            num_dropped_messages=beat.num_dropped_messages,
            status=beat.status,
            metrics_address=beat.metrics_address,
        )

    def _queue_row(self, beat: Presence) -> QueueRow | None:
        status = beat.status
        if not isinstance(status, SchedulerStatus):
            return None
        return QueueRow(
            name=beat.name,
            instance_id=beat.instance_id,
            num_waiting=status.num_waiting,
            num_running=status.num_running,
            output_tokens_per_s=self._rate(beat, "num_output_tokens"),
            cache_hit_share=status.num_cached_tokens / status.num_prompt_tokens if status.num_prompt_tokens else None,
            num_preemptions=status.num_preemptions,
        )

    def _executor_row(self, beat: Presence) -> ExecutorRow | None:
        status = beat.status
        if not isinstance(status, ExecutorStatus):
            return None
        holder = self._directory.get(status.held_by) if status.held_by else None
        views = holder.status.executors if holder and isinstance(holder.status, SchedulerStatus) else ()
        busy = self._rate(beat, "busy_s")
        return ExecutorRow(
            name=beat.name,
            instance_id=beat.instance_id,
            device=status.device,
            held_by=holder.name if holder else status.held_by,
            busy_share=None if busy is None else min(busy, 1.0),
            computed_tokens_per_s=self._rate(beat, "num_tokens"),
            guessed_right_share=status.num_guessed_right / status.num_guessed if status.num_guessed else None,
            blocks=next((view for view in views if view.executor_id == beat.instance_id), None),
        )

    def _rate(self, beat: Presence, counter: str) -> float | None:
        """How fast a counter of an instance grew lately, each second."""
        first, last = self._heard[beat.instance_id][0], self._heard[beat.instance_id][-1]
        if last.at <= first.at:
            return None
        growth: float = getattr(last.beat.status, counter) - getattr(first.beat.status, counter)
        return max(growth, 0.0) / (last.at - first.at)
