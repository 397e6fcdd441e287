"""Who is alive: the beats that an instance sends and the directory that it keeps of the others."""

from shared.clock import Clock
from shared.ids import SERVING, InstanceId, Service
from shared.messages import Presence

BEAT_INTERVAL_S = 0.5
DEAD_AFTER_S = 3 * BEAT_INTERVAL_S + 0.25
"""Three missed beats, and a little for the way. Not less: on two cores with 30 processes that want to run, one beat in
a hundred came 1.1 s after the one before it or later, and the latest 1.5 s."""


class Directory:
    """The instances heard of lately. Knows nothing of how beats arrive."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._instances: dict[InstanceId, Presence] = {}
        self._last_heard: dict[InstanceId, float] = {}
        self._last_expiry = clock.now()

    def observe(self, beat: Presence) -> bool:
        """Take in one beat. True if it says something new: the instance joined, left, or began to drain."""
        before = self._instances.get(beat.instance_id)
        if beat.is_leaving:
            return self._forget(beat.instance_id) is not None
        self._instances[beat.instance_id] = beat
        self._last_heard[beat.instance_id] = self._clock.now()
        return before is None or (before.is_draining, before.models) != (beat.is_draining, beat.models)

    def expire(self) -> list[Presence]:
        """Forget and return the instances that are silent for too long. Call it at least once a second.

        If this process itself stood still since the last call, the others get that time on top: their beats may
        be waiting unread.
        """
        now = self._clock.now()
        stall = now - self._last_expiry - BEAT_INTERVAL_S
        self._last_expiry = now
        if stall > BEAT_INTERVAL_S:
            self._last_heard = {instance: heard + stall for instance, heard in self._last_heard.items()}
        silent = [instance for instance, heard in self._last_heard.items() if now - heard > DEAD_AFTER_S]
        return [beat for instance in silent if (beat := self._forget(instance)) is not None]

    def get(self, instance_id: InstanceId) -> Presence | None:
        """The last beat of an instance that is alive, else None."""
        return self._instances.get(instance_id)

    def has_heard_all(self, service: Service, since: float) -> bool:
        """Whether every instance of a service that counts as alive has beaten since a moment of the clock."""
        return all(self._last_heard[beat.instance_id] >= since for beat in self.alive(service))

    def alive(self, service: Service, model: str | None = None) -> list[Presence]:
        """The instances of a service, by instance id; only those that serve `model` if given."""
        return sorted(
            (
                beat
                for beat in self._instances.values()
                if beat.service is service and (model is None or model in beat.models)
            ),
            key=lambda beat: beat.instance_id,
        )

    def available(self, service: Service, model: str | None = None) -> list[Presence]:
        """Those of `alive` that take new work."""
        return [beat for beat in self.alive(service, model) if not beat.is_draining]

    def num_available(self, model: str) -> dict[Service, int]:
        """How many instances of each service that a model needs take work for it.

        A scheduler names the models of the executors that it holds, and an executor gets work through its scheduler
        alone: if there are schedulers and none of them names the model, what it lacks is an executor.
        """
        counts = {service: len(self.available(service, model)) for service in SERVING}
        if counts[Service.SCHEDULER] == 0 and (schedulers := self.available(Service.SCHEDULER)):
            counts |= {Service.SCHEDULER: len(schedulers), Service.EXECUTOR: 0}
        return counts

    def _forget(self, instance_id: InstanceId) -> Presence | None:
        self._last_heard.pop(instance_id, None)
        return self._instances.pop(instance_id, None)
