"""What came of a call: a digest and a few counts, enough to tell whether another run gave the same.

A whole plan is kept only if that was asked for.
"""

from collections.abc import Sequence
from hashlib import blake2b

from msgspec.structs import replace

from services.scheduler.core.events import Event
from services.scheduler.recording.calls import Returned
from services.scheduler.recording.part import Part
from shared.codec import encode
from shared.ids import RequestId
from shared.messages import ChoiceTokens, Outcome, StepPlan


class Planned(Part, frozen=True, tag="planned"):
    """A plan."""

    step_id: int
    num_assigned: int
    num_rows: int
    num_tokens: int
    num_sampled: int
    digest: bytes
    plan: StepPlan | None = None
    """The whole of it, if plans were to be kept."""


class Ended(Part, frozen=True):
    """A request that ended."""

    request_id: RequestId
    outcome: Outcome
    reason: str | None


class Told(Part, frozen=True, tag="told"):
    """Events, at least one."""

    num_tokens: int
    ended: tuple[Ended, ...]
    digest: bytes


class Raised(Part, frozen=True, tag="raised"):
    """An exception: a refusal, or a bug."""

    kind: str
    message: str


Answer = Planned | Told | Raised | None
"""None: nothing to compute, nothing to tell."""


def answer_to(returned: Returned, *, keeps_plan: bool = False) -> Answer:
    """What a call returned, as it is recorded."""
    if not returned:
        return None
    if isinstance(returned, StepPlan):
        return Planned(
            returned.step_id,
            len(returned.assigned),
            len(returned.slots),
            sum(returned.counts),
            len(returned.sampled_rows),
            _digest(encode(returned)),
            returned if keeps_plan else None,
        )
    return _told(returned)


def raised(error: Exception) -> Raised:
    """What a call raised, as it is recorded."""
    return Raised(type(error).__name__, str(error))


class _Items(Part, frozen=True):
    items: Sequence[ChoiceTokens | Ended]


def _told(events: Sequence[Event]) -> Told:
    num_tokens = 0
    items: list[ChoiceTokens | Ended] = []
    ended: list[Ended] = []
    for event in events:
        if isinstance(event, ChoiceTokens):
            num_tokens += len(event.token_ids)
            items.append(replace(event, logprobs=()) if event.logprobs else event)
        else:
            ended.append(Ended(event.request.request_id, event.outcome, event.reason))
            items.append(ended[-1])
    return Told(num_tokens, tuple(ended), _digest(encode(_Items(items))))


def _digest(data: bytes) -> bytes:
    """64 bits: enough to notice a difference by accident, which is all that is asked of it."""
    return blake2b(data, digest_size=8).digest()
