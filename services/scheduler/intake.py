"""Which submissions become requests, and the memory that makes submission and cancelling idempotent.

A later attempt was let in once already, by a scheduler that is lost: it does not have to fit into the queue.
"""

from collections import OrderedDict
from typing import Final

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from services.scheduler.pace import RETRY_AFTER_S, Pace
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable
from shared.ids import RequestId
from shared.messages import SubmitTokens

_MAX_REMEMBERED: Final = 16_384


class Intake:
    """Lets submissions in, within the limits of the configuration."""

    def __init__(self, fleet: Fleet, config: SchedulerConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._num_arrivals = 0
        self._pace = Pace()

    def started(self, request: Request, now: float) -> None:
        """A request that waited runs now."""
        self._pace.started(request.tenant, len(request.prompt), now)

    def admit(self, message: SubmitTokens, now: float) -> Request:
        """A submission as a request, to be queued next. Raises the RequestError that refuses it."""
        room = self._fleet.max_total_tokens(message.model)
        if room is None:
            raise Unavailable(f"no executor for {message.model} is there at the moment", retry_after_s=RETRY_AFTER_S)
        num_prompt_tokens = len(message.prompt_token_ids)
        max_tokens = max(1, room - num_prompt_tokens) if message.max_tokens is None else message.max_tokens
        if room < num_prompt_tokens + max_tokens <= self._fleet.max_total_tokens_of_all(message.model):
            raise Unavailable(
                "the only executor that holds so many tokens is shutting down", retry_after_s=RETRY_AFTER_S
            )
        if num_prompt_tokens + max_tokens > room:  # whoever is told to come back later should have a chance then
            raise PromptTooLong(
                f"{num_prompt_tokens} tokens of prompt and {max_tokens} to generate make"
                f" {num_prompt_tokens + max_tokens}; an executor holds {room}"
            )
        if message.attempt == 1:
            self._check_queue(message.tenant, num_prompt_tokens, now)
        try:
            request = Request(
                message.request_id,
                message.prompt_token_ids,
                message.sampling,
                arrival=self._num_arrivals,
                max_tokens=max_tokens,
                num_choices=message.num_choices,
                priority=message.priority,
                model=message.model,
                tenant=message.tenant,
                salts=() if self._config.share_prefixes else (("tenant", message.tenant),),
                resumed=message.resumed,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._num_arrivals += 1
        return request

    def queue(self, request: Request) -> None:
        """Queue a request that was admitted, unless its output is complete."""
        if not request.is_finished:
            self._fleet.add(request)

    def _check_queue(self, tenant: str, num_tokens: int, now: float) -> None:
        """Raise Overloaded if the queue is full, for all or for one tenant. A queue that is empty takes any request."""
        config = self._config
        for whose, what, max_choices, max_tokens in (
            (None, "", config.max_waiting_requests, config.max_waiting_tokens),
            (tenant, f" of {tenant}", config.max_tenant_requests, config.max_tenant_tokens),
        ):
            load = self._fleet.waiting(whose)
            if max_choices and load.num_choices >= max_choices:
                raise Overloaded(
                    f"{load.num_choices} requests{what} wait already",
                    retry_after_s=self._pace.seconds_for(load.num_choices - max_choices + 1, now, whose),
                )
            num_too_many = load.num_tokens + num_tokens - max_tokens
            if max_tokens and load.num_choices and num_too_many > 0:
                raise Overloaded(
                    f"requests{what} with {load.num_tokens} tokens wait already",
                    retry_after_s=self._pace.seconds_for_tokens(min(num_too_many, load.num_tokens), now, whose),
                )


class Memory:
    """The latest requests that something happened to, each with the latest attempt that it happened to."""

    def __init__(self, size: int = _MAX_REMEMBERED) -> None:
        self._size = size
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()

    def add(self, request_id: RequestId, attempt: int) -> None:
        """Remember one more; the oldest is forgotten when there are too many."""
        self._attempts[request_id] = max(attempt, self._attempts.get(request_id, 0))
        if len(self._attempts) > self._size:
            self._attempts.popitem(last=False)

    def discard(self, request_id: RequestId) -> None:
        """Forget one."""
        self._attempts.pop(request_id, None)

    def has(self, request_id: RequestId, attempt: int) -> bool:
        """Whether it happened to this attempt of a request, or to a later one."""
        return self._attempts.get(request_id, 0) >= attempt
