"""What the core tells of: tokens appended to a choice's log (as their own message) and requests that ended."""

from typing import NamedTuple

from services.scheduler.core.request import Request
from shared.messages import ChoiceTokens, Outcome


class RequestEnded(NamedTuple):
    """All choices of a request are finished; it holds nothing any more."""

    request: Request
    outcome: Outcome
    reason: str | None = None
    """Why it failed."""


Event = ChoiceTokens | RequestEnded
