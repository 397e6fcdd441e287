"""What a scheduler writes down of requests that have no gateway any more: it died with them, or before it could.

The gateway writes the record of every request that ends for a client; where both do, one is kept. So a scheduler may
write of any request whose gateway is lost, also of one that had ended a moment before.
"""

import time
from collections.abc import Callable

from shared.ids import InstanceId
from shared.messages import RequestClosed, SubmitTokens, UsageRecord


class UsageRecords:
    """Makes a scheduler's usage records and hands them on."""

    def __init__(
        self, scheduler_id: InstanceId, add: Callable[[UsageRecord], None], unix_time: Callable[[], float] = time.time
    ) -> None:
        """`add` takes each record, at once, and sees to it that it is kept."""
        self._scheduler_id = scheduler_id
        self._add = add
        self._unix_time = unix_time

    def ended_alone(self, closed: RequestClosed, submission: SubmitTokens, *, ago_s: float = 0.0) -> None:
        """A request has ended, `ago_s` ago, and its gateway is lost."""
        self._add(
            UsageRecord(
                request_id=closed.request_id,
                tenant=submission.tenant,
                model=submission.model,
                outcome=closed.outcome,
                usage=closed.usage,
                ended_at=self._unix_time() - ago_s,
                recorded_by=self._scheduler_id,
                error_code=closed.error.code if closed.error else None,
            )
        )
