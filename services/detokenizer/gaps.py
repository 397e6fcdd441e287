"""What is missing here of the logs, and when their schedulers are asked for it again.

Asked at once, then after longer and longer pauses, so that a scheduler that cannot help is not flooded. For a request
that is open here the question is repeated until the gap is filled; for another one only when something of it arrives.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import Final

from services.detokenizer.outbox import Outbox
from shared.ids import InstanceId, RequestId
from shared.messages import ReplayLog

_FIRST_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 8.0
_MAX_REMEMBERED: Final = 16_384


@dataclass(slots=True)
class _Question:
    asked_at: float = -inf
    pause_s: float = 0.0

    def is_due(self, now: float) -> bool:
        """Whether it is to be asked now; then the next time comes after a longer pause."""
        if now - self.asked_at < self.pause_s:
            return False
        self.asked_at = now
        self.pause_s = min(max(2 * self.pause_s, _FIRST_PAUSE_S), _MAX_PAUSE_S)
        return True


@dataclass(slots=True)
class _Gap:
    scheduler_id: InstanceId
    question: _Question = field(default_factory=_Question)
    choices: set[int | None] = field(default_factory=set)
    """Where entries are missing; None: before the end of the request."""


class Gaps:
    """The requests of which something is missing. Puts its questions into the outbox."""

    def __init__(self, outbox: Outbox, detokenizer_id: InstanceId) -> None:
        self._outbox = outbox
        self._detokenizer_id = detokenizer_id
        self.num_found = 0
        """Times that entries were found missing, or belonged to a request that is not known."""
        self.num_asked = 0
        """Questions to schedulers."""
        self._gaps: dict[RequestId, _Gap] = {}
        self._unknown: OrderedDict[tuple[InstanceId, RequestId], _Question] = OrderedDict()

    def __len__(self) -> int:
        """Open requests that wait for what they miss."""
        return len(self._gaps)

    def found(self, scheduler_id: InstanceId, request_id: RequestId, index: int | None, now: float) -> None:
        """Entries of an open request are missing: before others of choice `index`, or (None) before its end."""
        self.num_found += 1
        gap = self._gaps.setdefault(request_id, _Gap(scheduler_id))
        gap.choices.add(index)
        self._ask(gap.scheduler_id, request_id, gap.question, now)

    def filled(self, request_id: RequestId, index: int) -> None:
        """Entries of an open request's choice went on where the last ones ended."""
        gap = self._gaps.get(request_id)
        if gap is not None:
            gap.choices.discard(index)
            if not gap.choices:
                del self._gaps[request_id]

    def forget(self, request_id: RequestId) -> None:
        """A request is not open any more."""
        self._gaps.pop(request_id, None)

    def unknown(self, scheduler_id: InstanceId, request_id: RequestId, now: float) -> None:
        """Something came of a request that this scheduler has not opened here."""
        self.num_found += 1
        key = (scheduler_id, request_id)
        question = self._unknown.setdefault(key, _Question())
        self._unknown.move_to_end(key)
        if len(self._unknown) > _MAX_REMEMBERED:
            self._unknown.popitem(last=False)
        self._ask(scheduler_id, request_id, question, now)

    def tick(self, now: float) -> None:
        """Time has passed: ask again for what is still missing."""
        for request_id, gap in self._gaps.items():
            self._ask(gap.scheduler_id, request_id, gap.question, now)

    def _ask(self, scheduler_id: InstanceId, request_id: RequestId, question: _Question, now: float) -> None:
        if question.is_due(now):
            self.num_asked += 1
            self._outbox.add_message(scheduler_id, ReplayLog(request_id, self._detokenizer_id))
