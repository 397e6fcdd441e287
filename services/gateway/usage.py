"""What the gateway writes down of each request that a scheduler accepted, when it ends for its client.

Counts are those of the log that the client reads: what was delivered, also where the mesh never said an end, or said
another one later. What another gateway had delivered before counts too.
"""

import time
from collections.abc import Callable

from services.gateway.open_request import OpenRequest
from services.gateway.streams import End
from shared.ids import InstanceId
from shared.messages import Usage, UsageRecord


class UsageRecords:
    """Makes a gateway's usage records and hands them on."""

    def __init__(
        self, gateway_id: InstanceId, add: Callable[[UsageRecord], None], unix_time: Callable[[], float] = time.time
    ) -> None:
        """`add` takes each record, at once, and sees to it that it is kept."""
        self._gateway_id = gateway_id
        self._add = add
        self._unix_time = unix_time

    def ended(self, request: OpenRequest, end: End) -> None:
        """A request has ended for its client. Nothing is written of one that the mesh never took."""
        if (usage := usage_of(request, end)) is None:
            return
        self._add(
            UsageRecord(
                request_id=request.request_id,
                tenant=request.spec.tenant,
                model=request.spec.model,
                outcome=end.outcome,
                usage=usage,
                ended_at=self._unix_time(),
                recorded_by=self._gateway_id,
                error_code=end.error.code if end.error else None,
            )
        )


def usage_of(request: OpenRequest, end: End) -> Usage | None:
    """What a request that ends so has consumed; None if the mesh never took it."""
    if not request.stream.is_accepted and end.usage is None:
        return None
    return delivered(request, end.usage)


def delivered(request: OpenRequest, said: Usage | None) -> Usage:
    """What a request has consumed that is delivered as far as it is here, if the mesh said `said`, or nothing."""
    return Usage(
        num_prompt_tokens=max(said.num_prompt_tokens if said else 0, request.num_prompt_tokens),
        num_cached_tokens=said.num_cached_tokens if said else request.past.num_cached_tokens or 0,
        num_output_tokens=_num_delivered(request),
    )


def _num_delivered(request: OpenRequest) -> tuple[int, ...]:
    """Tokens of each choice; while the part that another gateway told is still on its way, at least those."""
    known = zip(request.stream.choices, request.num_tokens(), strict=True)
    return tuple(len(choice.token_ids) if choice.finish_reason is not None else count for choice, count in known)
