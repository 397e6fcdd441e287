"""The executors that this scheduler holds, and the plans that each still owes a result. Sends nothing itself."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.ids import InstanceId
from shared.messages import ExecutorAttached, ExecutorStatus, Presence, RunStep, StepCompleted, StepPlan


@dataclass(slots=True)
class Attachment:
    """One executor, held since some epoch."""

    executor_id: InstanceId
    epoch: int
    unanswered: deque[RunStep] = field(default_factory=deque)
    """Plans without a result, oldest first."""
    waiting_since: float = 0.0
    """When the oldest of them was sent last, or became the oldest."""
    num_plans: int = 0
    """Plans sent, each once."""

    def sent(self, plan: StepPlan, now: float) -> RunStep:
        """Note a plan as sent; returns the message that carries it."""
        message = RunStep(self.epoch, plan)
        if not self.unanswered:
            self.waiting_since = now
        self.unanswered.append(message)
        self.num_plans += 1
        return message

    def answered(self, step_id: int, now: float) -> bool:
        """Whether a result is the one due now; if so, its plan is done with."""
        if not self.unanswered or self.unanswered[0].plan.step_id != step_id:
            return False
        self.unanswered.popleft()
        self.waiting_since = now
        return True

    def to_resend(self, from_step_id: int, now: float) -> list[RunStep]:
        """The unanswered plans from some step on."""
        self.waiting_since = now
        return [message for message in self.unanswered if message.plan.step_id >= from_step_id]


class Attachments:
    """All executors that this scheduler holds."""

    def __init__(self, scheduler_id: InstanceId) -> None:
        self._scheduler_id = scheduler_id
        self._by_executor: dict[InstanceId, Attachment] = {}

    def __iter__(self) -> Iterator[Attachment]:
        return iter(tuple(self._by_executor.values()))

    def get(self, executor_id: InstanceId) -> Attachment | None:
        """The attachment of an executor that is held."""
        return self._by_executor.get(executor_id)

    def of(self, message: StepCompleted) -> Attachment | None:
        """The attachment that a result belongs to; None if it is of another epoch."""
        attachment = self._by_executor.get(message.executor_id)
        return attachment if attachment is not None and attachment.epoch == message.epoch else None

    def add(self, message: ExecutorAttached) -> Attachment:
        """Hold an executor."""
        attachment = Attachment(message.executor_id, message.epoch)
        self._by_executor[message.executor_id] = attachment
        return attachment

    def remove(self, executor_id: InstanceId) -> None:
        """Hold an executor no longer."""
        self._by_executor.pop(executor_id, None)

    def is_lost(self, beat: Presence) -> bool:
        """Whether an executor's beat tells that it is held by another, or by nobody, since it was attached here."""
        attachment = self._by_executor.get(beat.instance_id)
        if attachment is None or not isinstance(beat.status, ExecutorStatus):
            return False
        is_mine = beat.status.held_by == self._scheduler_id and beat.status.epoch == attachment.epoch
        return not is_mine and beat.status.epoch >= attachment.epoch
