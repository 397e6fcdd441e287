"""What a recording consists of: a header, a record for each call on the fleet, and, unless it was cut off, an end."""

from services.scheduler.core.settings import SchedulerSettings
from services.scheduler.recording.answers import Answer
from services.scheduler.recording.calls import Call
from services.scheduler.recording.part import Part
from shared.ids import InstanceId


class Header(Part, frozen=True):
    """Whose decisions these are, and what the fleet was made with."""

    shoal_version: str
    scheduler_id: InstanceId
    started_at: float
    """Seconds since the Unix epoch."""
    tenant_weights: dict[str, float]
    lobby: SchedulerSettings
    """Of the scheduler where requests wait that no executor can take; each executor's come with it."""


class Record(Part, frozen=True, tag="call"):
    """One call on the fleet."""

    at: float
    """Seconds since the recording began."""
    call: Call
    answer: Answer


class EndOfRecording(Part, frozen=True, tag="end"):
    """The last record of a recording that was not cut off, and why nothing follows."""

    reason: str
