"""What happened to one request: when it came, where it was, which steps computed it, and how it ended."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Choice, ChoiceState, Request
from services.scheduler.recording.answers import Answer, Raised, Told
from services.scheduler.recording.calls import (
    AddRequest,
    Apply,
    Call,
    Cancel,
    Fail,
    RemoveExecutor,
    Returned,
    Schedule,
    Stop,
)
from services.scheduler.recording.records import Record
from shared.ids import InstanceId, RequestId
from shared.messages import StepPlan


class Entry(msgspec.Struct):
    """One line of it."""

    number: int
    """Of the record; of the first, if there are several."""
    at: float
    """Seconds since the recording began."""
    executor_id: InstanceId | None
    text: str


class _Look(NamedTuple):
    """A choice between two calls."""

    state: ChoiceState
    executor_id: InstanceId | None
    num_computed_tokens: int


_LOBBY = "the lobby: no executor can take it"


class Timeline:
    """Looks on, for one request."""

    def __init__(self, request_id: RequestId) -> None:
        self.entries: list[Entry] = []
        self._request_id = request_id
        self._request: Request | None = None
        self._looks: list[_Look] = []
        self._outputs: dict[int, _Outputs] = {}

    def before(self, record: Record, fleet: Fleet) -> None:
        """Remember how everything was."""
        if self._request is not None:
            self._looks = [_look(choice, fleet) for choice in self._request.choices]

    def after(self, number: int, record: Record, fleet: Fleet, returned: Returned, answer: Answer) -> None:
        """Note what has changed."""
        is_new = isinstance(record.call, AddRequest) and record.call.request_id == self._request_id
        if is_new:
            self._note_arrival(number, record, fleet, answer)
        if self._request is None:
            return
        for text in _asked(record.call, self._request_id):
            self._add(number, record, None, text)
        for choice, was in zip(self._request.choices, self._looks, strict=True):
            now = _look(choice, fleet)
            if not is_new:
                for text in _moves(choice, was, now, record.call, returned):
                    self._add(number, record, now.executor_id or was.executor_id, text)
            if isinstance(returned, StepPlan) and _is_at(record.call, now):
                self._note_row(number, record, choice, returned)
        if isinstance(answer, Told):
            for ended in answer.ended:
                if ended.request_id == self._request_id:
                    reason = "" if ended.reason is None else f": {ended.reason}"
                    self._add(number, record, None, f"the request ended, {ended.outcome}{reason}")
                    self._request = None

    def _add(self, number: int, record: Record, executor_id: InstanceId | None, text: str) -> None:
        self._outputs.clear()
        self.entries.append(Entry(number, record.at, executor_id, text))

    def _note_arrival(self, number: int, record: Record, fleet: Fleet, answer: Answer) -> None:
        call = record.call
        assert isinstance(call, AddRequest)
        choices = f"{call.num_choices} choices, " if call.num_choices > 1 else ""
        text = f"arrived: {len(call.prompt)} prompt tokens, at most {call.max_tokens} of output, {choices}"
        self._add(number, record, None, f"{text}priority {call.priority}, tenant {call.tenant!r}")
        if isinstance(answer, Raised):
            self._add(number, record, None, f"refused: {answer.message}")
            return
        self._request = fleet.get(self._request_id)
        assert self._request is not None
        self._looks = [_look(choice, fleet) for choice in self._request.choices]
        where = self._looks[0].executor_id
        self._add(number, record, where, f"waits in {_LOBBY}" if where is None else "placed here, waits")

    def _note_row(self, number: int, record: Record, choice: Choice, plan: StepPlan) -> None:
        """What a step computes of a choice; a run of steps with one token each is one entry."""
        if choice.slot is None or choice.slot not in plan.slots:
            return
        row = plan.slots.index(choice.slot)
        start, count = plan.starts[row], plan.counts[row]
        samples = row in plan.sampled_rows
        if count > 1 or not samples or start < len(choice.request.prompt):
            end = ", and samples" if samples else ""
            text = f"step {plan.step_id} computes tokens {start} to {start + count - 1}{end}"
            self._add(number, record, _executor_of(record.call), _of(choice) + text)
            return
        run = self._outputs.get(choice.index)
        if run is None:
            self.entries.append(Entry(number, record.at, _executor_of(record.call), ""))
            run = self._outputs[choice.index] = _Outputs(self.entries[-1], plan.step_id)
        run.extend(choice, plan.step_id)


class _Outputs:
    """Steps in a row that computed one token of output each."""

    def __init__(self, entry: Entry, first_step_id: int) -> None:
        self._entry = entry
        self._first_step_id = first_step_id
        self._num_tokens = 0

    def extend(self, choice: Choice, step_id: int) -> None:
        self._num_tokens += 1
        steps = f"step {step_id}" if self._num_tokens == 1 else f"steps {self._first_step_id} to {step_id}"
        what = "an output token" if self._num_tokens == 1 else f"{self._num_tokens} output tokens"
        self._entry.text = f"{_of(choice)}{steps}: {what}"


def _look(choice: Choice, fleet: Fleet) -> _Look:
    for executor_id, scheduler in fleet.schedulers.items():
        if choice in scheduler.waiting or choice in scheduler.running:
            return _Look(choice.state, executor_id, choice.num_computed_tokens)
    return _Look(choice.state, None, choice.num_computed_tokens)


def _moves(choice: Choice, was: _Look, now: _Look, call: Call, returned: Returned) -> Iterator[str]:
    """What a call did to a choice, beside computing."""
    who = _of(choice)
    is_admitted = isinstance(returned, StepPlan) and any(
        (a.request_id, a.choice_index) == (choice.request.request_id, choice.index) for a in returned.assigned
    )
    if was.state is ChoiceState.RUNNING and (now.state is ChoiceState.PREEMPTED or is_admitted):
        why = "its executor is gone" if isinstance(call, RemoveExecutor) else "preempted"
        yield f"{who}{why}: {was.num_computed_tokens} tokens were computed"
    if was.state is ChoiceState.HELD and now.state is ChoiceState.WAITING:
        yield f"{who}the prompt is computed: waits, to share it"
    if was.executor_id != now.executor_id and now.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED):
        yield f"{who}waits in {_LOBBY}" if now.executor_id is None else f"{who}placed here, waits"
    if is_admitted:
        assert isinstance(returned, StepPlan)
        yield f"{who}admitted in step {returned.step_id}, slot {choice.slot}{_found(choice, returned)}"
    if was.state is not ChoiceState.FINISHED and now.state is ChoiceState.FINISHED:
        reason = f": {choice.finish_reason}" if choice.finish_reason else ""
        yield f"{who}ended with {len(choice.output)} tokens{reason}"


def _found(choice: Choice, plan: StepPlan) -> str:
    """What a choice that a plan admits need not have computed."""
    if choice.slot is None or choice.slot not in plan.slots:
        return ""
    num_tokens = plan.starts[plan.slots.index(choice.slot)]
    return f", {num_tokens} tokens are there already" if num_tokens else ""


def _asked(call: Call, request_id: RequestId) -> Iterator[str]:
    """What others wanted of the request."""
    match call:
        case Cancel() if call.request_id == request_id:
            yield "to be cancelled"
        case Fail() if call.request_id == request_id:
            yield f"to fail: {call.reason}"
        case Stop() if call.request_id == request_id:
            yield f"choice {call.index} reached a stop string with {call.num_tokens} tokens"
        case _:
            pass


def _of(choice: Choice) -> str:
    return f"choice {choice.index}: " if len(choice.request.choices) > 1 else ""


def _executor_of(call: Call) -> InstanceId | None:
    return call.executor_id if isinstance(call, Schedule | Apply) else None


def _is_at(call: Call, look: _Look) -> bool:
    return _executor_of(call) == look.executor_id is not None
