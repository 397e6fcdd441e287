"""The way of spans out of this process: a queue that never makes anybody wait, and a thread that empties it.

Owns the queue, its bound and the count of what was dropped. How spans are said is with whoever sends them (`otlp`).
"""

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from shared.messages import Span

log = logging.getLogger(__name__)

MAX_WAITING: Final = 16_384
_BATCH: Final = 512
_PAUSE_S: Final = 1.0


class Loss(NamedTuple):
    """Spans that did not arrive."""

    num_spans: int
    reason: str


class Sender(Protocol):
    """Says spans to a collector. Called in a thread of its own."""

    def send(self, spans: Sequence[Span]) -> Loss | None:
        """What did not arrive; None if all did."""
        ...

    def give_up(self) -> None:
        """Let the call of `send` that goes on end soon; it is called from another thread."""
        ...


class QueueExporter:
    """Exports in the background. Spans that find no room, or do not arrive, are counted and dropped."""

    def __init__(self, sender: Sender, *, max_waiting: int = MAX_WAITING, pause_s: float = _PAUSE_S) -> None:
        """At most `max_waiting` spans wait; after `pause_s`, or when there are many, they are sent."""
        self._sender = sender
        self._max_waiting = max_waiting
        self._pause_s = pause_s
        self._waiting: deque[Span] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._num_refused = 0  # written by `offer` alone
        self._num_lost = 0  # written by the thread alone
        self._was_sent = True
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Spans that never arrived, since start."""
        return self._num_refused + self._num_lost

    def offer(self, span: Span) -> None:
        """Export a span some time. Never waits; counts the span as dropped if there is no room."""
        num_waiting = len(self._waiting)
        if num_waiting >= self._max_waiting:
            self._num_refused += 1
            return
        self._waiting.append(span)
        if num_waiting == _BATCH:
            self._wake.set()

    def close(self, within_s: float) -> None:
        """Send what waits, as far as the time reaches; what is left then is dropped."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._waiting.clear()
            self._sender.give_up()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._pause_s)
            self._wake.clear()
            while self._waiting:
                self._send_some()
        while self._waiting:
            self._send_some()

    def _send_some(self) -> None:
        batch: list[Span] = []
        while self._waiting and len(batch) < _BATCH:
            batch.append(self._waiting.popleft())
        loss = self._send(batch)
        if loss is None:
            if not self._was_sent:
                log.info("spans arrive again", extra={"num_dropped": self.num_dropped})
            self._was_sent = True
            return
        self._num_lost += loss.num_spans
        if self._was_sent:
            log.warning("spans do not arrive at their collector; serving goes on", extra={"error": loss.reason})
        self._was_sent = False

    def _send(self, batch: Sequence[Span]) -> Loss | None:
        try:
            return self._sender.send(batch)
        except Exception as error:  # whatever a sender does, requests have nothing to do with it
            return Loss(len(batch), f"{type(error).__name__}: {error}")
