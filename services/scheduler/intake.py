"""Which submissions become requests, and the memory that makes submission and cancelling idempotent."""

from collections import OrderedDict
from typing import Final

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fleet import Fleet, NeverFits
from services.scheduler.core.request import Request
from shared.errors import InvalidRequest, Overloaded, PromptTooLong, Unavailable
from shared.ids import RequestId
from shared.messages import SubmitTokens

RETRY_AFTER_S: Final = 1.0

_MAX_REMEMBERED: Final = 16_384


def admit(message: SubmitTokens, fleet: Fleet, arrival: int, config: SchedulerConfig) -> Request:
    """Queue a submission as a request. Raises the RequestError that refuses it."""
    room = fleet.max_total_tokens(message.model)
    if room is None:
        raise Unavailable(f"no executor for {message.model} is there at the moment", retry_after_s=RETRY_AFTER_S)
    if fleet.num_waiting >= config.max_waiting_requests:
        raise Overloaded(f"{fleet.num_waiting} requests are waiting already", retry_after_s=RETRY_AFTER_S)
    num_prompt_tokens = len(message.prompt_token_ids)
    max_tokens = max(1, room - num_prompt_tokens) if message.max_tokens is None else message.max_tokens
    try:
        request = Request(
            message.request_id,
            message.prompt_token_ids,
            message.sampling,
            arrival=arrival,
            max_tokens=max_tokens,
            num_choices=message.num_choices,
            model=message.model,
            salts=() if config.share_prefixes else (("tenant", message.tenant),),
        )
        fleet.add(request)
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
    except NeverFits as error:
        raise PromptTooLong(
            f"{num_prompt_tokens} tokens of prompt and {max_tokens} to generate make {error.num_tokens};"
            f" an executor holds {error.max_tokens}"
        ) from None
    return request


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
