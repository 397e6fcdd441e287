"""Making recorded calls on a fresh fleet, and comparing what comes of each with what was recorded."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.recording.answers import Answer, Planned, Told, answer_to, raised
from services.scheduler.recording.calls import AddExecutor, AddRequest, Returned
from services.scheduler.recording.records import Header, Record
from shared.ids import RequestId
from shared.messages import ExecutorCapacity


class Difference(NamedTuple):
    """A call of which something else came than was recorded."""

    number: int
    record: Record
    came_out: Answer


class Crash(NamedTuple):
    """A call that raised what nobody expects of the core."""

    number: int
    trace: str


class Broken(NamedTuple):
    """A call after which the fleet contradicts itself."""

    number: int
    record: Record
    what: str


class Observer(Protocol):
    """Somebody who looks on."""

    def before(self, record: Record, fleet: Fleet) -> None:
        """A call is about to be made."""

    def after(self, number: int, record: Record, fleet: Fleet, returned: Returned, answer: Answer) -> None:
        """A call was made; `number` counts from 1."""


class Player:
    """A fresh fleet that goes through what a recorded one went through."""

    def __init__(self, header: Header, observers: Sequence[Observer] = (), *, checks_invariants: bool = False) -> None:
        self._settings = header.lobby
        self._observers = observers
        self._checks_invariants = checks_invariants
        self.fleet = Fleet(self._make_scheduler, header.tenant_weights)
        self.num_played = 0
        self.open_requests: dict[RequestId, None] = {}
        """Those that have not ended, in order of arrival."""
        self.crashes: list[Crash] = []
        """What was raised and reproduced; there are few, since a process does not outlive one."""

    def play(self, records: Iterable[Record], *, until: int | None = None) -> Difference | Broken | None:
        """Make the calls, up to but without number `until`; the first difference or contradiction, after which nothing
        is played, or None."""
        for record in islice(records, None if until is None else until - 1):
            problem = self._play(record)
            self.num_played += 1
            if problem is not None:
                return problem
        return None

    def _play(self, record: Record) -> Difference | Broken | None:
        number = self.num_played + 1
        for observer in self._observers:
            observer.before(record, self.fleet)
        if isinstance(record.call, AddExecutor):
            self._settings = record.call.settings
        returned: Returned = None
        try:
            returned = record.call.perform(self.fleet)
        except Exception as error:
            answer: Answer = raised(error)
            if not isinstance(record.call, AddRequest):  # which may be refused
                self.crashes.append(Crash(number, traceback.format_exc()))
        else:
            answer = answer_to(
                returned, keeps_plan=isinstance(record.answer, Planned) and record.answer.plan is not None
            )
        self._note(record, answer)
        for observer in self._observers:
            observer.after(number, record, self.fleet, returned, answer)
        if answer != record.answer:
            return Difference(number, record, answer)
        return self._check(number, record) if self._checks_invariants else None

    def _note(self, record: Record, answer: Answer) -> None:
        if isinstance(record.call, AddRequest) and answer is None:
            self.open_requests[record.call.request_id] = None
        if isinstance(answer, Told):
            for ended in answer.ended:
                self.open_requests.pop(ended.request_id, None)

    def _check(self, number: int, record: Record) -> Broken | None:
        try:
            self.fleet.check_invariants()
        except AssertionError as error:
            return Broken(number, record, str(error) or "an invariant does not hold")
        return None

    def _make_scheduler(self, capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
        return self._settings.make_scheduler(capacity, shares)


def differing_fields(recorded: Answer, came_out: Answer) -> list[tuple[str, str, str]]:
    """What two answers of one kind differ in: each field with both values; of whole plans, each of theirs."""
    if not isinstance(recorded, msgspec.Struct) or type(recorded) is not type(came_out):
        return []
    rows = _fields(recorded, came_out, repr)
    if isinstance(recorded, Planned) and isinstance(came_out, Planned) and recorded.plan and came_out.plan:
        rows = [row for row in rows if row[0] != "plan"]
        rows += [(f"plan.{name}", a, b) for name, a, b in _fields(recorded.plan, came_out.plan, _brief)]
    return rows


def _fields(one: msgspec.Struct, other: msgspec.Struct, show: Callable[[object], str]) -> list[tuple[str, str, str]]:
    pairs = [(name, getattr(one, name), getattr(other, name)) for name in one.__struct_fields__]
    return [(name, show(a), show(b)) for name, a, b in pairs if a != b]


def _brief(value: object) -> str:
    text = repr(list(value)) if hasattr(value, "typecode") and isinstance(value, Iterable) else repr(value)
    return text if len(text) <= 400 else f"{text[:400]} …"
