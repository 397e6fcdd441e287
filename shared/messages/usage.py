"""Usage records: what each accepted request consumed, kept by the broker for whoever accounts for it.

Written by the gateway when a request ends for its client, and by the scheduler for those that have no gateway any more.
The request's id is the record's id, so that both may write it and it is kept once.
"""

from typing import Final

from shared.ids import InstanceId, RequestId
from shared.messages.base import Message
from shared.messages.delivery import Outcome, Usage

USAGE_LEDGER: Final = "SHOAL_USAGE"


class UsageRecord(Message, frozen=True):
    """One request, ended."""

    request_id: RequestId
    tenant: str
    model: str
    outcome: Outcome
    usage: Usage
    """Its output tokens are those delivered, however often they were said on the way."""
    ended_at: float
    """Seconds of Unix time."""
    recorded_by: InstanceId
    error_code: str | None = None
    """Why it failed, if it did."""
