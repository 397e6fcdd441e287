"""Which scheduler a request goes on at when its own is lost, or has lost it.

Owns the attempts of requests and what was left behind at schedulers that cannot be told. A table of requests
(`requests`) says when; what is raised here ends the request for its client.
"""

import logging
from collections.abc import Callable

from services.gateway.left_behind import LeftBehind
from services.gateway.open_request import OpenRequest
from services.gateway.submissions import Outgoing, next_attempt
from shared import subjects
from shared.codec import encode
from shared.errors import Unavailable
from shared.ids import InstanceId
from shared.log import about

log = logging.getLogger(__name__)

TRY_AGAIN_AFTER_S = 0.5
"""A request that a scheduler could not take over is offered again after this."""
_MAX_LOSSES = 8
"""A request that so many schedulers have lost, without a token in between, may be what kills them."""
_MAX_REDIRECTS = 3
"""Schedulers that a new request is offered to before the client is told that none takes it."""

Choose = Callable[[str], InstanceId | None]
"""The scheduler to give a request for a model to, if there is one."""


def nobody(_model: str) -> InstanceId | None:
    """Who chooses no scheduler, ever."""
    return None


class Handover:
    """Gives requests to schedulers. What it raises is Unavailable: the request cannot go on."""

    def __init__(self, gateway_id: InstanceId, choose: Choose, max_bytes: Callable[[], int]) -> None:
        """`choose` finds a scheduler for a model; `max_bytes` is what a message may have."""
        self.num_resubmitted = 0
        """How often a request was given to another scheduler, since start."""
        self._choose = choose
        self._max_bytes = max_bytes
        self._left_behind = LeftBehind(gateway_id)

    def leave_behind(self, request: OpenRequest) -> None:
        """Its scheduler cannot be told what becomes of a request; it will be if it comes back."""
        if request.scheduler_id is not None:
            self._left_behind.add(request.scheduler_id, request.request_id, request.attempt)

    def came_back(self, scheduler_id: InstanceId) -> list[Outgoing]:
        """What to tell a scheduler that is heard again."""
        return [(subjects.inbox(scheduler_id), encode(message)) for message in self._left_behind.take(scheduler_id)]

    def lose(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Its scheduler does not have a request any more, or cannot be heard: find another one."""
        self.leave_behind(request)
        request.num_losses += 1
        if request.num_losses >= _MAX_LOSSES:
            request.scheduler_id = None
            raise Unavailable(f"{request.num_losses} schedulers in a row lost this request.")
        return self.leave(request, now, try_again_at=now)

    def redirect(self, request: OpenRequest, now: float) -> list[Outgoing] | None:
        """Give a request that its scheduler did not take to another one; None if its client is to hear of the refusal.

        What the client was told is running is not refused any more: it is offered again and again.
        """
        if request.stream.is_accepted:
            return self.leave(request, now, try_again_at=now + TRY_AGAIN_AFTER_S)
        elsewhere = self._choose(request.spec.model)
        if elsewhere is None or elsewhere == request.scheduler_id or request.attempt >= _MAX_REDIRECTS:
            return None
        request.begin_next_attempt(now)
        return self._give_to(elsewhere, request, now)

    def leave(self, request: OpenRequest, now: float, *, try_again_at: float) -> list[Outgoing]:
        """A request has no scheduler: find one, not before `try_again_at`."""
        request.begin_next_attempt(now)
        request.try_again_at = try_again_at
        return self.find_home(request, now)

    def find_home(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Give a request that has no scheduler to one, if there is one now."""
        if now < request.try_again_at or (scheduler_id := self._choose(request.spec.model)) is None:
            return []
        return self._give_to(scheduler_id, request, now)

    def _give_to(self, scheduler_id: InstanceId, request: OpenRequest, now: float) -> list[Outgoing]:
        """Submit a request once more, with the output that is here."""
        submission = next_attempt(
            request.spec,
            request.stream.choices,
            scheduler_id=scheduler_id,
            attempt=request.attempt,
            timeout_ms=request.timeout_ms(now),
            max_bytes=self._max_bytes(),
        )
        if len(submission[1]) > self._max_bytes():
            raise Unavailable("This request has become too large to be given to another scheduler.")
        self.num_resubmitted += 1
        extra = about(request.request_id, request.trace_id) | {"attempt": request.attempt}
        log.info("request goes on elsewhere", extra=extra)
        request.scheduler_id, request.submission = scheduler_id, submission
        request.sent_at, request.num_submissions = now, 1
        return [submission]
