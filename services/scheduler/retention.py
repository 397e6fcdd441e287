"""The logs of requests that have ended, kept for those who missed something and for clients that come back.

Bounded in time and in memory, which is counted in tokens. Sends nothing itself.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from services.scheduler.streams import EndedStream
from shared.ids import RequestId

_REQUEST_TOKENS: Final = 500
"""What a request takes beside its tokens, in tokens of 4 bytes."""
_LOGPROB_TOKENS: Final = 12
"""What a log-probability takes, with the token that it belongs to, likewise."""


class Retention:
    """Ended requests by id, the oldest first."""

    def __init__(self, max_age_s: float, max_tokens: int) -> None:
        self._max_age_s = max_age_s
        self._max_tokens = max_tokens
        self._ended: OrderedDict[RequestId, tuple[EndedStream, int]] = OrderedDict()
        """Each with its weight."""
        self._num_tokens = 0

    def add(self, stream: EndedStream) -> None:
        """Keep a request that has ended; the oldest ones give way, and one that is too large is not kept."""
        self.discard(stream.request_id)
        weight = _weight(stream)
        self._ended[stream.request_id] = stream, weight
        self._num_tokens += weight
        while self._num_tokens > self._max_tokens:
            self.discard(next(iter(self._ended)))

    def get(self, request_id: RequestId) -> EndedStream | None:
        """An ended request that is still kept."""
        kept = self._ended.get(request_id)
        return None if kept is None else kept[0]

    def discard(self, request_id: RequestId) -> None:
        """Keep a request no longer."""
        kept = self._ended.pop(request_id, None)
        if kept is not None:
            self._num_tokens -= kept[1]

    def expire(self, now: float) -> None:
        """Drop what ended too long ago."""
        while self._ended:
            oldest, _ = next(iter(self._ended.values()))
            if now - oldest.ended_at < self._max_age_s:
                return
            self.discard(oldest.request_id)

    def __iter__(self) -> Iterator[EndedStream]:
        """Oldest first."""
        return (stream for stream, _ in self._ended.values())

    def __len__(self) -> int:
        return len(self._ended)


def _weight(stream: EndedStream) -> int:
    """About the memory of a stream, in tokens."""
    num_tokens = _REQUEST_TOKENS + len(stream.submission.prompt_token_ids) + len(stream.submission.client) // 4
    for choice in stream.tokens:
        num_alternatives = sum(1 + len(each.top_logprobs) for each in choice.logprobs if each is not None)
        num_tokens += len(choice.token_ids) + _LOGPROB_TOKENS * num_alternatives
    return num_tokens
