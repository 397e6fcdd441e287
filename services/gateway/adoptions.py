"""Questions to all schedulers that wait for an answer: who has this request, for which a client has come back?

Nobody says that a request is unknown, so no answer in time means that; unless a scheduler was lost lately, which may
have it and come back, or whose requests are on their way to another one.
"""

import asyncio
import math
import secrets
from dataclasses import dataclass
from typing import Final

from services.gateway.config import GatewayConfig
from services.gateway.open_request import OpenRequest
from services.gateway.submissions import Outgoing
from shared import subjects
from shared.codec import encode
from shared.errors import NotFound, RequestError, Unavailable
from shared.ids import InstanceId, RequestId
from shared.messages import AdoptRequest

_RETRY_AFTER_S: Final = 1.0


def unknown_request() -> NotFound:
    """What a client is told that may not have a request, whatever the reason: it learns nothing about others'."""
    return NotFound("There is no such request, or it cannot be resumed any more.", param="request_id")


@dataclass(slots=True)
class _Query:
    answer: asyncio.Future[OpenRequest]
    question: Outgoing
    asked_at: float
    was_repeated: bool = False


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
        """A future that gives the request or raises NotFound, and what asks for it."""
        query_id = f"adopt-{secrets.token_hex(8)}"
        message = AdoptRequest(query_id, request_id, owner, self._gateway_id)
        question = subjects.ADOPTIONS, encode(message)
        answer: asyncio.Future[OpenRequest] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = _Query(answer, question, now)
        answer.add_done_callback(lambda _: self._queries.pop(query_id, None))
        return answer, [question]

    def found(self, query_id: str, request: OpenRequest) -> None:
        """A scheduler has answered. Further answers are ignored."""
        query = self._queries.get(query_id)
        if query is not None and not query.answer.done():
            query.answer.set_result(request)

    def tick(self, now: float, *, lost_at: float = -math.inf) -> list[Outgoing]:
        """Time has passed: ask once more half way, then give up. `lost_at` is when a scheduler was lost last."""
        repeated = []
        for query in list(self._queries.values()):
            waited_s = now - query.asked_at
            if query.answer.done():
                continue
            if waited_s >= self._config.adopt_timeout_s:
                query.answer.set_exception(self._no_answer(now - lost_at))
            elif waited_s >= self._config.adopt_timeout_s / 2 and not query.was_repeated:
                query.was_repeated = True
                repeated.append(query.question)
        return repeated

    def fail_all(self) -> None:
        """Nobody will answer any more."""
        for query in list(self._queries.values()):
            if not query.answer.done():
                query.answer.set_exception(unknown_request())

    def _no_answer(self, lost_ago_s: float) -> RequestError:
        if lost_ago_s < self._config.failover_timeout_s:
            return Unavailable("The scheduler of this request may just be lost.", retry_after_s=_RETRY_AFTER_S)
        return unknown_request()
