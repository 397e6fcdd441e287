"""What a client has of one request: every character and token once, whatever is said twice.

Pure: events in, deltas and the result out. Knows nothing of connections.
"""

from collections.abc import Mapping
from typing import Any

from shoal.results import Choice, Delta, Result, Timing, TokenLogprob, logprobs_of, usage_of


class Gap(Exception):
    """An event begins after the end of what is there: something before it is missing."""


class _Log:
    """One choice."""

    def __init__(self, num_chars: int = 0, num_tokens: int = 0) -> None:
        self.num_chars = num_chars
        self.num_tokens = num_tokens
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class Received:
    """The choices of one request, as far as they have come."""

    def __init__(self, offset: int = 0, token_offset: int = 0) -> None:
        """`offset` and `token_offset` are what somebody else already has of the first choice."""
        self._logs: dict[int, _Log] = {}
        if offset or token_offset:
            self._logs[0] = _Log(offset, token_offset)

    @property
    def is_empty(self) -> bool:
        """Whether nothing has come."""
        return not self._logs

    def offsets(self) -> tuple[list[int], list[int]]:
        """How many characters and tokens of each choice there are: where to go on."""
        logs = [self._logs.get(index, _Log()) for index in range(max(self._logs, default=-1) + 1)]
        return [log.num_chars for log in logs], [log.num_tokens for log in logs]

    def take(self, event: Mapping[str, Any]) -> Delta | None:
        """What a `request.delta` says that is new; None if that is nothing. Raises Gap."""
        index, text = event["index"], event["text"]
        token_ids, logprobs = event.get("token_ids") or [], event.get("logprobs") or []
        log = self._logs.setdefault(index, _Log())
        num_known_chars = log.num_chars - event["offset"]
        num_known_tokens = log.num_tokens - event.get("token_offset", log.num_tokens)
        if num_known_chars < 0 or num_known_tokens < 0:
            raise Gap
        delta = Delta(
            index=index,
            offset=log.num_chars,
            text=text[num_known_chars:],
            token_ids=tuple(token_ids[num_known_tokens:]),
            logprobs=logprobs_of(logprobs[num_known_tokens:]),
        )
        log.num_chars += len(delta.text)
        log.num_tokens += max(len(delta.token_ids), len(delta.logprobs))
        log.texts.append(delta.text)
        log.token_ids += delta.token_ids
        log.logprobs += delta.logprobs
        return delta if delta.text or delta.token_ids or delta.logprobs else None

    def result(self, event: Mapping[str, Any]) -> Result:
        """The whole, from a `request.completed`."""
        timing = event["timing"]
        return Result(
            request_id=event["request_id"],
            choices=tuple(self._choice(choice["index"], choice["finish_reason"]) for choice in event["choices"]),
            usage=usage_of(event["usage"]),
            timing=Timing(timing["queue_s"], timing["first_token_s"], timing["total_s"]),
        )

    def _choice(self, index: int, finish_reason: str) -> Choice:
        log = self._logs.get(index, _Log())
        return Choice(index, "".join(log.texts), finish_reason, tuple(log.token_ids), tuple(log.logprobs))
