"""How far a run has come, for faults that wait for their moment, and how long its streams stood still."""

import asyncio
import time
from dataclasses import dataclass, field
from enum import StrEnum

from tests.chaos.history import Connected, Ending, Event, Piece


class Moment(StrEnum):
    """When in a run something happens, as its clients see it."""

    QUEUED = "queued"
    """All requests have been sent, and half of them accepted; most wait."""
    PREFILL = "prefill"
    """The first text has come; most prompts are being computed, or wait."""
    DECODE = "decode"
    """Two fifths of all text have come."""
    FINISHING = "finishing"
    """A quarter of the streams have ended, and others are about to."""


@dataclass(slots=True)
class Record:
    """What one client has seen of one stream so far."""

    name: str
    num_choices: int
    events: list[Event] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    """The last one is the request that counts; earlier ones never said anything, and were asked for anew."""
    num_resumed: int = 0
    worst_pause_s: float = 0.0
    heard_at: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether a terminal event has come."""
        return any(isinstance(event, Ending) for event in self.events)


class Progress:
    """All streams of one run."""

    def __init__(self, num_streams: int, num_chars: int | None) -> None:
        """`num_chars` is what all text together will be, if that is known."""
        self.problems: list[str] = []
        """What went wrong that belongs to no stream."""
        self._num_streams = num_streams
        self._num_chars_in_all = num_chars
        self._num_sent = 0
        self._num_accepted = 0
        self._num_begun = 0
        self._num_ended = 0
        self._num_chars = 0
        self._changed = asyncio.Event()

    @property
    def num_chars(self) -> int:
        """Characters that have come."""
        return self._num_chars

    @property
    def is_over(self) -> bool:
        """Whether every stream has ended."""
        return self._num_ended >= self._num_streams

    @property
    def num_ended(self) -> int:
        """Streams that have ended."""
        return self._num_ended

    def sent(self) -> None:
        """One more request has been sent for the first time."""
        self._num_sent += 1
        self._changed.set()

    def accepted(self, record: Record, request_id: str) -> None:
        """A request was accepted, or a resumed one was found again."""
        self._num_accepted += not record.request_ids
        if request_id not in record.request_ids:
            record.request_ids.append(request_id)
        self._changed.set()

    def saw(self, record: Record, event: Event) -> None:
        """Something came for a stream: keep it."""
        now = time.monotonic()
        if not isinstance(event, Connected):
            if record.heard_at:
                record.worst_pause_s = max(record.worst_pause_s, now - record.heard_at)
            record.heard_at = now
        if isinstance(event, Piece):
            self._num_begun += not any(isinstance(each, Piece) for each in record.events)
            self._num_chars += len(event.text)
        elif isinstance(event, Ending):
            self._num_ended += not record.is_over
        record.events.append(event)
        self._changed.set()

    async def until(self, moment: Moment) -> None:
        """Return when the moment has come."""
        while not self._has_come(moment):
            self._changed.clear()
            await self._changed.wait()

    async def until_share(self, share: float) -> None:
        """Return when a share of all text has come, or nothing more will."""
        assert self._num_chars_in_all is not None, "how much text there will be is not known yet"
        while self._num_chars < share * self._num_chars_in_all and not self.is_over:
            self._changed.clear()
            await self._changed.wait()

    def _has_come(self, moment: Moment) -> bool:
        match moment:
            case Moment.QUEUED:
                return self._num_sent == self._num_streams and self._num_accepted >= self._num_streams / 2
            case Moment.PREFILL:
                return self._num_begun >= 1
            case Moment.DECODE:
                assert self._num_chars_in_all is not None, "how much text there will be is not known yet"
                return self._num_chars >= 0.4 * self._num_chars_in_all
            case Moment.FINISHING:
                return self._num_ended >= self._num_streams / 4
