"""What happened in a recording, in numbers."""

import msgspec

from services.scheduler.core.fleet import Fleet
from services.scheduler.recording.answers import Answer, Planned, Raised, Told
from services.scheduler.recording.calls import AddExecutor, AddRequest, PinPrefix, RemoveExecutor, Returned
from services.scheduler.recording.records import Record
from shared.messages import Outcome


class Summary(msgspec.Struct):
    """Counts over the records that were played."""

    num_records: int = 0
    span_s: float = 0.0
    """From the beginning of the recording to the last record."""
    num_requests: int = 0
    num_refused: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_open: int = 0
    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_executors: int = 0
    num_executors_died: int = 0
    num_pins: int = 0


class Counting:
    """Counts what it sees."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._num_preemptions_before = 0
        """On executors that are gone."""

    def before(self, record: Record, fleet: Fleet) -> None:
        """An executor takes its count with it."""
        if isinstance(record.call, RemoveExecutor) and record.call.executor_id in fleet.schedulers:
            self._num_preemptions_before += fleet.schedulers[record.call.executor_id].num_preemptions
            self.summary.num_executors_died += record.call.has_died

    def after(self, number: int, record: Record, fleet: Fleet, returned: Returned, answer: Answer) -> None:
        """Count a call and what came of it."""
        summary = self.summary
        summary.num_records = number
        summary.span_s = record.at
        match record.call:
            case AddExecutor():
                summary.num_executors += 1
            case AddRequest() if isinstance(answer, Raised):
                summary.num_refused += 1
            case AddRequest():
                summary.num_requests += 1
            case PinPrefix():
                summary.num_pins += 1
            case _:
                pass
        match answer:
            case Planned():
                summary.num_steps += 1
                summary.num_computed_tokens += answer.num_tokens
            case Told():
                summary.num_output_tokens += answer.num_tokens
                self._count_ends([ended.outcome for ended in answer.ended])
            case _:
                pass
        live = sum(scheduler.num_preemptions for scheduler in fleet.schedulers.values())
        summary.num_preemptions = self._num_preemptions_before + live
        summary.num_open = summary.num_requests - summary.num_completed - summary.num_cancelled - summary.num_failed

    def _count_ends(self, outcomes: list[Outcome]) -> None:
        self.summary.num_completed += outcomes.count(Outcome.COMPLETED)
        self.summary.num_cancelled += outcomes.count(Outcome.CANCELLED)
        self.summary.num_failed += outcomes.count(Outcome.FAILED)
