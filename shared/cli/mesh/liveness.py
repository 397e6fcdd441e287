"""Which processes of a mesh have begun to beat, and which have gone silent although they run. Decides only."""

from shared.clock import Clock
from shared.ids import InstanceId
from shared.messages import Presence

HUNG_AFTER_S = 30.0
"""A process that beat once and has been silent for so long is stuck: nothing but a restart helps."""


class Liveness:
    """Who was heard, by the name that the supervisor gave it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_heard: dict[str, float] = {}
        self._beats: dict[str, Presence] = {}
        """The last one of each that has not left by itself."""
        self._dead: set[InstanceId] = set()
        self._last_check = clock.now()

    def observe(self, beat: Presence) -> bool:
        """Take in one beat. True if it is the first since the process of this name started."""
        if beat.instance_id in self._dead:  # its last beat came late
            return False
        if beat.is_leaving:
            self._last_heard.pop(beat.name, None)
            self._beats.pop(beat.name, None)
            self._dead.add(beat.instance_id)
            return False
        self._beats[beat.name] = beat
        is_first = beat.name not in self._last_heard
        self._last_heard[beat.name] = self._clock.now()
        return is_first

    def forget(self, name: str) -> Presence | None:
        """This process died; its last beat, unless it had said by itself that it leaves."""
        self._last_heard.pop(name, None)
        beat = self._beats.pop(name, None)
        if beat is not None:
            self._dead.add(beat.instance_id)
        return beat

    def has_heard(self, name: str) -> bool:
        """Whether it has begun to beat."""
        return name in self._last_heard

    def hung(self, *, is_connected: bool) -> list[str]:
        """Those that are stuck, and forget them. Call it about twice a second.

        While the broker is away, or while this process itself stood still, nobody's silence counts.
        """
        now = self._clock.now()
        excused = now - self._last_check if not is_connected else max(0.0, now - self._last_check - 1.0)
        self._last_check = now
        self._last_heard = {name: heard + excused for name, heard in self._last_heard.items()}
        hung = [name for name, heard in self._last_heard.items() if now - heard > HUNG_AFTER_S]
        for name in hung:
            self.forget(name)
        return hung
