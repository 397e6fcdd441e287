"""What every process tells: CPU time and memory, the lag of its event loop, its actor's mailbox and broker.

Reads `/proc` where there is one; elsewhere some numbers are missing.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shared.actor import Actor
from shared.health import STALE_AFTER_S
from shared.messages import Message
from shared.telemetry.metrics import Histogram, Instrument, Kind, Reading

_PROC: Final = Path("/proc/self")
_LAG_INTERVAL_S: Final = 0.25
_LAG_BOUNDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def process_instruments(started: float) -> list[Instrument]:
    """The metrics of this process, `started` by `time.monotonic`."""
    return [
        Reading("process.cpu.time", Kind.COUNTER, "s", "CPU time", _cpu_s, ("cpu.mode",)),
        Reading("process.memory.usage", Kind.SUM, "By", "Resident memory", _memory_bytes),
        Reading("process.thread.count", Kind.SUM, "{thread}", "Threads", _num_threads),
        Reading(
            "process.unix.file_descriptor.count",
            Kind.SUM,
            "{file_descriptor}",
            "Open files and sockets",
            lambda: _num_entries("fd"),
        ),
        Reading(
            "process.uptime", Kind.GAUGE, "s", "Since the start of its metrics", lambda: time.monotonic() - started
        ),
    ]


class LoopLag:
    """How much later than asked for the event loop wakes a timer: what everything that waits its turn waits for."""

    def __init__(self) -> None:
        self.histogram = Histogram(
            "shoal.loop.lag", "s", "How much later than asked for the event loop woke a timer", _LAG_BOUNDS
        )

    async def measure_for_ever(self) -> None:
        """Look a few times a second."""
        while True:
            asked_at = time.monotonic()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.histogram.record(max(0.0, time.monotonic() - asked_at - _LAG_INTERVAL_S))


class Pulse:
    """Whether an actor works, as its ticks tell: they go through its mailbox, behind everything else."""

    def __init__(self, actor: Actor[Any]) -> None:
        self._actor = actor
        self._num_seen = -1
        self._seen_at = 0.0

    def complaint(self) -> str | None:
        """What is wrong, or None if it gets to its messages."""
        now = self._actor.clock.now()
        if self._actor.num_handled_ticks != self._num_seen:
            self._num_seen, self._seen_at = self._actor.num_handled_ticks, now
        silence_s = now - self._seen_at
        return f"has handled nothing for {silence_s:.1f} s" if silence_s > STALE_AFTER_S else None

    def unreadiness(self) -> str | None:
        """Why it takes no work, or None if it does."""
        if not self._actor.transport.is_connected:
            return "has no connection to NATS"
        return "is draining" if self._actor.is_draining else None


class Reconnections:
    """Counts how often an actor's connection to the broker was lost and found again."""

    def __init__(self, actor: Actor[Any]) -> None:
        self.count = 0
        actor.transport.on_reconnect(self._add)

    def _add(self) -> None:
        self.count += 1


def actor_instruments(actor: Actor[Any]) -> Sequence[Instrument]:
    """The metrics that every service has."""
    transport, traffic, reconnections = actor.transport, actor.transport.traffic, Reconnections(actor)
    return [
        Reading("shoal.mailbox.depth", Kind.SUM, "{message}", "Messages that wait", lambda: actor.mailbox_depth),
        Reading(
            "shoal.mailbox.handled",
            Kind.COUNTER,
            "{message}",
            "Messages handled, by their tag",
            lambda: _by_tag(actor.num_handled),
            ("message",),
        ),
        Reading(
            "shoal.messages.dropped",
            Kind.COUNTER,
            "{message}",
            "Messages dropped",
            lambda: {"transport": transport.num_dropped, "service": actor.num_dropped_messages},
            ("reason",),
        ),
        Reading(
            "shoal.broker.messages",
            Kind.COUNTER,
            "{message}",
            "Messages sent to the broker and received",
            lambda: {"sent": traffic.num_sent, "received": traffic.num_received},
            ("direction",),
        ),
        Reading(
            "shoal.broker.io",
            Kind.COUNTER,
            "By",
            "Bytes of these, without headers",
            lambda: {"sent": traffic.bytes_sent, "received": traffic.bytes_received},
            ("direction",),
        ),
        Reading("shoal.broker.connected", Kind.GAUGE, "1", "Whether it is", lambda: transport.is_connected),
        Reading(
            "shoal.broker.reconnections",
            Kind.COUNTER,
            "{connection}",
            "Times the connection was lost and found again",
            lambda: reconnections.count,
        ),
        Reading("shoal.draining", Kind.GAUGE, "1", "Whether it takes nothing new", lambda: actor.is_draining),
    ]


def _by_tag(counts: Mapping[type, int]) -> dict[str, float]:
    """Of messages alone: ticks and what an actor says to itself have no tag."""
    return {str(kind.__struct_config__.tag): count for kind, count in counts.items() if issubclass(kind, Message)}


def _cpu_s() -> dict[str, float]:
    times = os.times()
    return {"user": times.user, "system": times.system}


def _memory_bytes() -> float | dict[str, float]:
    try:
        return int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return {}


def _num_threads() -> float | dict[str, float]:
    return _num_entries("task") or threading.active_count()


def _num_entries(folder: str) -> int | dict[str, float]:
    try:
        return len(os.listdir(_PROC / folder))
    except OSError:
        return {}
