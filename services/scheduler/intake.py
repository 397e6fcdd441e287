"""Which submissions become requests, how long the refused should wait, and the memory that makes submission and
cancelling idempotent."""

from bisect import bisect_left
from collections import OrderedDict
from typing import Final

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable
from shared.ids import RequestId
from shared.messages import SubmitTokens

RETRY_AFTER_S: Final = 1.0
"""When nothing is known about how long it will take."""

_MAX_REMEMBERED: Final = 16_384
_MAX_RETRY_AFTER_S: Final = 60.0
_RATE_WINDOW_S: Final = 10.0


class Intake:
    """Lets submissions in, within the limits of the configuration."""

    def __init__(self, fleet: Fleet, config: SchedulerConfig) -> None:
        self._fleet = fleet
        self._config = config
        self._num_arrivals = 0
        self._starts: list[float] = []
        """When requests began to run, lately."""

    def started(self, now: float) -> None:
        """A request that waited runs now."""
        self._starts.append(now)
        if self._starts[0] < now - 2 * _RATE_WINDOW_S:
            self._starts = [start for start in self._starts if start >= now - _RATE_WINDOW_S]

    def admit(self, message: SubmitTokens, now: float) -> Request:
        """Queue a submission as a request. Raises the RequestError that refuses it."""
        room = self._fleet.max_total_tokens(message.model)
        if room is None:
            raise Unavailable(f"no executor for {message.model} is there at the moment", retry_after_s=RETRY_AFTER_S)
        num_prompt_tokens = len(message.prompt_token_ids)
        max_tokens = max(1, room - num_prompt_tokens) if message.max_tokens is None else message.max_tokens
        if num_prompt_tokens + max_tokens > room:  # whoever is told to come back later should have a chance then
            raise PromptTooLong(
                f"{num_prompt_tokens} tokens of prompt and {max_tokens} to generate make"
                f" {num_prompt_tokens + max_tokens}; an executor holds {room}"
            )
        self._check_queue(message.tenant, now)
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
            )
            self._fleet.add(request)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._num_arrivals += 1
        return request

    def _check_queue(self, tenant: str, now: float) -> None:
        config = self._config
        mine, everyone = self._fleet.waiting(tenant), self._fleet.waiting()
        for what, load, max_choices, max_tokens in (
            ("", everyone, config.max_waiting_requests, config.max_waiting_tokens),
            (f" of {tenant}", mine, config.max_tenant_requests, config.max_tenant_tokens),
        ):
            if max_choices and load.num_choices >= max_choices:
                excess = load.num_choices - max_choices + 1
                raise Overloaded(
                    f"{load.num_choices} requests{what} wait already", retry_after_s=self._retry_after_s(excess, now)
                )
            if max_tokens and load.num_tokens >= max_tokens:
                raise Overloaded(
                    f"requests{what} with {load.num_tokens} tokens wait already",
                    retry_after_s=self._retry_after_s(1, now),
                )

    def _retry_after_s(self, num_places: int, now: float) -> float:
        """When so many places will be free, if requests go on to start as fast as lately."""
        recent = len(self._starts) - bisect_left(self._starts, now - _RATE_WINDOW_S)
        if not recent:
            return RETRY_AFTER_S
        return min(_MAX_RETRY_AFTER_S, max(RETRY_AFTER_S, num_places * _RATE_WINDOW_S / recent))


class Memory:
    """The latest request ids that something happened to."""

    def __init__(self, size: int = _MAX_REMEMBERED) -> None:
        self._size = size
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def add(self, request_id: RequestId) -> None:
        """Remember one more; the oldest is forgotten when there are too many."""
        self._ids[request_id] = None
        if len(self._ids) > self._size:
            self._ids.popitem(last=False)

    def discard(self, request_id: RequestId) -> None:
        """Forget one."""
        self._ids.pop(request_id, None)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._ids
