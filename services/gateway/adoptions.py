"""Looking for requests whose clients have come back: who has this one, and may it be followed here from now on?

Two steps, so that a question that arrives late moves nothing: a scheduler says that it has the request, and which
attempt of it; only a gateway whose client still waits then adopts that attempt.

Nobody says that a request is unknown, so no answer in time means that; unless a scheduler is silent, or was lost
lately: it may have the request and come back, or what it had may be on its way to another one.
"""

import asyncio
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from services.gateway.config import GatewayConfig
from services.gateway.open_request import OpenRequest
from services.gateway.submissions import Outgoing
from shared import attempts, subjects
from shared.codec import encode
from shared.errors import NotFound, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import AdoptRequest, CancelRequest, FindRequest, RequestFound

_RETRY_AFTER_S: Final = 1.0


def unknown_request() -> NotFound:
    """What a client is told that may not have a request, whatever the reason: it learns nothing about others'."""
    return NotFound("There is no such request, or it cannot be resumed any more.", param="request_id")


def _perhaps_lost() -> Unavailable:
    """What a client is told whose request may turn up again."""
    return Unavailable("The scheduler of this request may just be lost.", retry_after_s=_RETRY_AFTER_S)


@dataclass(slots=True)
class _Query:
    """One request that a client waits for."""

    answer: asyncio.Future[OpenRequest]
    question: FindRequest
    asked_at: float
    was_repeated: bool = False
    found: dict[InstanceId, int] = field(default_factory=dict)
    """Which attempt each scheduler has that has answered."""
    next_attempt: int = 0
    """As which it was asked for last."""

    def adoption(self, found: RequestFound) -> AdoptRequest:
        """Ask for the attempt that was found."""
        asked = self.question
        self.next_attempt = attempts.after_adoption(max(found.attempt, self.next_attempt), asked.gateway_id)
        return AdoptRequest(
            asked.query_id, asked.request_id, asked.owner, asked.gateway_id, found.attempt, self.next_attempt
        )


class Adoptions:
    """The requests that are looked for."""

    def __init__(self, gateway_id: InstanceId, config: GatewayConfig) -> None:
        self._gateway_id = gateway_id
        self._config = config
        self._queries: dict[str, _Query] = {}

    def __len__(self) -> int:
        return len(self._queries)

    def look_for(
        self, request_id: RequestId, owner: str, now: float
    ) -> tuple[asyncio.Future[OpenRequest], list[Outgoing]]:
        """A future that gives the request or raises NotFound, and what asks for it. Who waits no longer cancels it."""
        query_id = f"adopt-{secrets.token_hex(8)}"
        question = FindRequest(query_id, request_id, owner, self._gateway_id)
        answer: asyncio.Future[OpenRequest] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = _Query(answer, question, now)
        answer.add_done_callback(lambda _: self._queries.pop(query_id, None))
        return answer, [(subjects.ADOPTIONS, encode(question))]

    def found(self, message: RequestFound, request: OpenRequest | None) -> list[Outgoing]:
        """A scheduler has a request: adopt it, if its client still waits and no later attempt has been found.

        `request` is the same one, if it is open here by now: then what was found is of use to nobody.
        """
        query = self._queries.get(message.query_id)
        if query is not None and not query.answer.done():
            is_latest = all(message.attempt > attempt for attempt in query.found.values())
            query.found[message.scheduler_id] = message.attempt
            return [(subjects.inbox(message.scheduler_id), encode(query.adoption(message)))] if is_latest else []
        if request is not None and message.attempt < request.attempt and message.scheduler_id != request.scheduler_id:
            return [self._dismissal(message.request_id, message.scheduler_id, message.attempt)]
        return []

    def adopted(self, query_id: str, request: OpenRequest) -> list[Outgoing]:
        """A request is followed here. Further answers are of no use: whoever has earlier attempts may forget them."""
        query = self._queries.get(query_id)
        if query is None or query.answer.done():
            return []
        query.answer.set_result(request)
        others = [(each, attempt) for each, attempt in query.found.items() if each != request.scheduler_id]
        return [self._dismissal(request.request_id, each, attempt) for each, attempt in others]

    def tick(
        self,
        now: float,
        *,
        lost_at: float = -math.inf,
        has_heard_all: Callable[[float], bool] = lambda _since: True,
    ) -> list[Outgoing]:
        """Time has passed: ask once more half way, then give up.

        `lost_at` is when a scheduler was lost last, `has_heard_all` says whether all others have been heard since.
        """
        repeated = []
        for query in list(self._queries.values()):
            waited_s = now - query.asked_at
            if query.answer.done():
                continue
            if waited_s >= self._config.adopt_timeout_s:
                is_certain = now - lost_at >= self._config.failover_timeout_s and has_heard_all(query.asked_at)
                query.answer.set_exception(unknown_request() if is_certain else _perhaps_lost())
            elif waited_s >= self._config.adopt_timeout_s / 2 and not query.was_repeated:
                query.was_repeated = True
                query.found.clear()
                repeated.append((subjects.ADOPTIONS, encode(query.question)))
        return repeated

    def fail_all(self) -> None:
        """Nobody will answer any more."""
        for query in list(self._queries.values()):
            if not query.answer.done():
                query.answer.set_exception(unknown_request())

    def _dismissal(self, request_id: RequestId, scheduler_id: InstanceId, attempt: int) -> Outgoing:
        message = CancelRequest(request_id, self._gateway_id, attempt, goes_on=True)
        return subjects.inbox(scheduler_id), encode(message)
