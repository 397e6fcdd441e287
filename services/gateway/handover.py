"""Which scheduler a request goes on at when its own is lost, or has lost it.

Owns the attempts of requests and what was left behind at schedulers that cannot be told. A table of requests
(`requests`) says when; what is raised here ends the request for its client.
"""

import logging
from collections.abc import Callable

from services.gateway.left_behind import LeftBehind
from services.gateway.open_request import OpenRequest
from services.gateway.submissions import Outgoing, next_attempt
from shared import attempts, subjects
from shared.codec import encode
from shared.errors import Unavailable
from shared.ids import InstanceId
from shared.log import about
from shared.messages import CancelRequest, RequestReleased

log = logging.getLogger(__name__)

TRY_AGAIN_AFTER_S = 0.5
"""A request that a scheduler could not take over is offered again after this."""
_MAX_LOSSES = 8
"""A request that so many schedulers have lost, without a token in between, may be what kills them."""
_MAX_REDIRECTS = 3
"""Schedulers that a new request is offered to before the client is told that none takes it."""

_MAX_BYTES = 1 << 20
_TRY_NEW_AGAIN_AFTER_S = 0.1
"""The same for a request that is new: whoever refused it is about to say why in its beat."""

Choose = Callable[[str], InstanceId | None]
"""The scheduler to give a request for a model to, if there is one."""

IsServed = Callable[[str], bool]
"""Whether a model has a scheduler, or will have one in a moment."""


class Handover:
    """Gives requests to schedulers. What it raises is Unavailable: the request cannot go on."""

    def __init__(
        self,
        gateway_id: InstanceId,
        choose: Choose,
        is_served: IsServed = lambda _model: True,
        max_bytes: Callable[[], int] = lambda: _MAX_BYTES,
    ) -> None:
        """`choose` finds a scheduler for a model; `is_served` says whether one is to be waited for if there is none;
        `max_bytes` is what a message may have."""
        self.num_resubmitted = 0
        """How often a request was given to another scheduler, since start."""
        self._gateway_id = gateway_id
        self._choose = choose
        self._is_served = is_served
        self._max_bytes = max_bytes
        self._left_behind = LeftBehind(gateway_id)

    def leave_behind(self, request: OpenRequest, *, goes_on: bool) -> None:
        """Its scheduler cannot be told what becomes of a request; it will be if it comes back."""
        if request.scheduler_id is not None:
            self._left_behind.add(request.scheduler_id, request.request_id, request.attempt, goes_on=goes_on)

    def came_back(self, scheduler_id: InstanceId) -> list[Outgoing]:
        """What to tell a scheduler that is heard again."""
        return [(subjects.inbox(scheduler_id), encode(message)) for message in self._left_behind.take(scheduler_id)]

    def lose(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Its scheduler does not have a request any more, or cannot be heard: find another one."""
        self.leave_behind(request, goes_on=True)
        request.num_losses += 1
        if request.num_losses >= _MAX_LOSSES:
            request.scheduler_id = None
            raise Unavailable(f"{request.num_losses} schedulers in a row lost this request.")
        return self.leave(request, now, try_again_at=now)

    def released(self, request: OpenRequest | None, message: RequestReleased, now: float) -> list[Outgoing]:
        """A scheduler keeps a request that it cannot go on with: find another one, and once that has it, or the request
        has ended here, tell the first one."""
        if request is None or (request.attempt > message.attempt and request.is_taken):
            done = CancelRequest(message.request_id, self._gateway_id, message.attempt, goes_on=True)
            return [(subjects.inbox(message.scheduler_id), encode(done))]
        is_here = (message.scheduler_id, message.attempt) == (request.scheduler_id, request.attempt)
        if not is_here or request.cancelled_at is not None:
            return []
        request.remember(message.past, now)
        return self.leave(request, now, try_again_at=now)

    def redirect(self, request: OpenRequest, now: float) -> list[Outgoing] | None:
        """Give a request that its scheduler did not take to another one; None if its client is to hear of the refusal.

        What the client was told is running is not refused any more: it is offered again and again. What is new is
        offered for a moment, as long as somebody should be there to take it.
        """
        if request.stream.is_accepted:
            return self.leave(request, now, try_again_at=now + TRY_AGAIN_AFTER_S)
        elsewhere = self._choose(request.spec.model)
        if elsewhere not in (None, request.scheduler_id) and request.attempt < _MAX_REDIRECTS:
            return self.leave(request, now, try_again_at=now)
        if not self._is_served(request.spec.model):
            return None
        request.waits_since = now if request.waits_since is None else request.waits_since
        return self.leave(request, now, try_again_at=now + _TRY_NEW_AGAIN_AFTER_S)

    def leave(self, request: OpenRequest, now: float, *, try_again_at: float) -> list[Outgoing]:
        """A request has no scheduler: find one, not before `try_again_at`."""
        request.begin_next_attempt(now)
        request.try_again_at = try_again_at
        return self.find_home(request, now)

    def find_home(self, request: OpenRequest, now: float) -> list[Outgoing]:
        """Give a request that has no scheduler to one, if there is one now."""
        if request.waits_since is not None and not self._is_served(request.spec.model):
            raise request.not_taken()
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
            past=request.past_until(now),
            max_bytes=self._max_bytes(),
        )
        if len(submission[1]) > self._max_bytes():
            raise Unavailable("This request has become too large to be given to another scheduler.")
        if request.attempt > attempts.FIRST:
            self.num_resubmitted += 1
            extra = about(request.request_id, request.spec.trace) | {"attempt": request.attempt}
            log.info("request goes on elsewhere", extra=extra)
        request.scheduler_id, request.submission = scheduler_id, submission
        request.sent_at, request.num_submissions = now, 1
        return [submission]
