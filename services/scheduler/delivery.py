"""Where each request's tokens go: its detokenizer, its gateway, and what is collected for them until it is sent.

One message a detokenizer and step, unless it would be larger than the broker carries. A detokenizer that is lost is
replaced: the whole log so far goes to another one, and the gateway drops what it has already.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from services.scheduler.core.request import Choice, Request
from shared.ids import InstanceId, RequestId
from shared.messages import (
    ChoiceTokens,
    DecodeTokens,
    Presence,
    RequestClosed,
    RequestOpened,
    Timing,
    int32s,
)


@dataclass(slots=True)
class Stream:
    """One open request as delivery sees it. Times are the clock's, in seconds."""

    request: Request
    opened: RequestOpened
    arrived_at: float
    detokenizer_id: InstanceId | None = None
    first_step_at: float | None = None
    first_token_at: float | None = None
    closed: RequestClosed | None = None
    """Its end, while there is no detokenizer to tell."""

    def timing(self, now: float) -> Timing:
        """Where its time went; what did not happen counts as until now."""
        return Timing(
            queue_s=(now if self.first_step_at is None else self.first_step_at) - self.arrived_at,
            first_token_s=(now if self.first_token_at is None else self.first_token_at) - self.arrived_at,
            total_s=now - self.arrived_at,
        )


_ENTRY_TOKENS: Final = 256
"""Tokens in an entry of a log that is sent again."""
_MESSAGE_BYTES: Final = 128
_ITEM_BYTES: Final = 128
"""What an entry has beside its tokens and log-probabilities."""

_Item = RequestOpened | ChoiceTokens | RequestClosed
_Opened = tuple[RequestOpened, ...]
_Tokens = tuple[ChoiceTokens, ...]
_Closed = tuple[RequestClosed, ...]


@dataclass(slots=True)
class _Outbox:
    opened: list[RequestOpened] = field(default_factory=list)
    tokens: list[ChoiceTokens] = field(default_factory=list)
    closed: list[RequestClosed] = field(default_factory=list)

    def split(self, max_bytes: int) -> Iterator[tuple[_Opened, _Tokens, _Closed]]:
        """The content in messages of at most `max_bytes`, by an upper estimate, in an order that keeps requests whole:
        all that opens, then all tokens, then all that closes."""
        items: list[_Item] = [*self.opened, *self.tokens, *self.closed]
        for batch in _batches(items, max_bytes):
            yield (
                tuple([item for item in batch if isinstance(item, RequestOpened)]),
                tuple([item for item in batch if isinstance(item, ChoiceTokens)]),
                tuple([item for item in batch if isinstance(item, RequestClosed)]),
            )


class Delivery:
    """The streams of all open requests and the messages being collected."""

    def __init__(self, scheduler_id: InstanceId) -> None:
        self._scheduler_id = scheduler_id
        self._streams: dict[RequestId, Stream] = {}
        self._num_streams: dict[InstanceId, int] = defaultdict(int)
        self._outboxes: dict[InstanceId, _Outbox] = defaultdict(_Outbox)
        self._untold: dict[RequestId, float] = {}
        """When each stream ended of whose end no detokenizer could be told, oldest first."""

    @property
    def is_empty(self) -> bool:
        """Whether every stream has ended, and its end is on its way or given up."""
        return not self._streams

    def get(self, request_id: RequestId) -> Stream | None:
        """The stream of a request that is open, or whose end could not be told yet."""
        return self._streams.get(request_id)

    def of_gateway(self, gateway_id: InstanceId) -> list[Stream]:
        """The streams that end at one gateway."""
        return [stream for stream in self._streams.values() if stream.opened.gateway_id == gateway_id]

    def open(self, stream: Stream, detokenizers: list[Presence]) -> None:
        """Start a stream; `detokenizers` are those that could serve it."""
        self._streams[stream.request.request_id] = stream
        self._assign(stream, detokenizers)

    def append(self, tokens: ChoiceTokens) -> None:
        """Deliver an entry of an open request's log."""
        detokenizer_id = self._streams[tokens.request_id].detokenizer_id
        if detokenizer_id is not None:
            self._outboxes[detokenizer_id].tokens.append(tokens)

    def close(self, closed: RequestClosed, now: float) -> None:
        """End a stream, after all its tokens. It stays until there is a detokenizer to tell of it."""
        stream = self._streams[closed.request_id]
        stream.closed = closed
        if stream.detokenizer_id is None:
            self._untold[closed.request_id] = now
        else:
            self._tell_end(stream, closed)

    def drop(self, stream: Stream) -> None:
        """Forget a stream that nobody wants to hear of any more and whose end waits for a detokenizer."""
        del self._streams[stream.request.request_id], self._untold[stream.request.request_id]

    def drop_untold(self, before: float) -> None:
        """Forget the streams that ended before some time and whose end still waits for a detokenizer: their gateways
        have given up."""
        for request_id in list(takewhile(lambda each: self._untold[each] < before, self._untold)):
            self.drop(self._streams[request_id])

    def move(self, lost: InstanceId, detokenizers: list[Presence]) -> None:
        """A detokenizer is lost: give its streams to others, each with its whole log."""
        self._outboxes.pop(lost, None)
        self._num_streams.pop(lost, None)
        for stream in self._streams.values():
            if stream.detokenizer_id == lost:
                stream.detokenizer_id = None
        self.settle(detokenizers)

    def settle(self, detokenizers: list[Presence]) -> None:
        """Give the streams that have no detokenizer one, now that some are there."""
        for stream in [stream for stream in self._streams.values() if stream.detokenizer_id is None]:
            detokenizer_id = self._assign(stream, detokenizers)
            if detokenizer_id is not None:
                self._outboxes[detokenizer_id].tokens += _log(stream.request.choices)
                if stream.closed is not None:
                    del self._untold[stream.request.request_id]
                    self._tell_end(stream, stream.closed)

    def flush(self, *, max_message_bytes: int) -> Iterator[tuple[InstanceId, DecodeTokens]]:
        """Everything collected: one message a detokenizer, or as many as it takes to keep each within the limit."""
        outboxes, self._outboxes = self._outboxes, defaultdict(_Outbox)
        for detokenizer_id, outbox in outboxes.items():
            for opened, tokens, closed in outbox.split(max_message_bytes):
                yield detokenizer_id, DecodeTokens(self._scheduler_id, opened, tokens, closed)

    def _tell_end(self, stream: Stream, closed: RequestClosed) -> None:
        assert stream.detokenizer_id is not None
        del self._streams[closed.request_id]
        self._outboxes[stream.detokenizer_id].closed.append(closed)
        self._num_streams[stream.detokenizer_id] -= 1

    def _assign(self, stream: Stream, detokenizers: list[Presence]) -> InstanceId | None:
        able = [beat.instance_id for beat in detokenizers if stream.opened.model in beat.models]
        if not able:
            return None
        chosen = min(able, key=lambda instance_id: (self._num_streams[instance_id], instance_id))
        stream.detokenizer_id = chosen
        self._num_streams[chosen] += 1
        self._outboxes[chosen].opened.append(stream.opened)
        return chosen


def _log(choices: Iterable[Choice]) -> Iterator[ChoiceTokens]:
    """The whole log so far of a request's choices, in entries that are small enough for any message."""
    for choice in choices:
        num_tokens = len(choice.output)
        for start in range(0, num_tokens, _ENTRY_TOKENS):
            is_last = start + _ENTRY_TOKENS >= num_tokens
            yield ChoiceTokens(
                choice.request.request_id,
                choice.index,
                start,
                choice.output[start : start + _ENTRY_TOKENS],
                choice.finish_reason if is_last else None,
                tuple(choice.logprobs[start : start + _ENTRY_TOKENS]),
            )
        if num_tokens == 0 and choice.finish_reason is not None:
            yield ChoiceTokens(choice.request.request_id, choice.index, 0, int32s(), choice.finish_reason)


def _batches(items: Iterable[_Item], max_bytes: int) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = _MESSAGE_BYTES
    for item in items:
        item_size = _size(item)
        if batch and size + item_size > max_bytes:
            yield batch
            batch, size = [], _MESSAGE_BYTES
        batch.append(item)
        size += item_size
    yield batch


def _size(item: _Item) -> int:
    """What an item takes in a message, at most."""
    match item:
        case ChoiceTokens():
            num_alternatives = sum(1 + len(each.top_logprobs) for each in item.logprobs if each is not None)
            return _ITEM_BYTES + 4 * len(item.token_ids) + 16 * (num_alternatives + len(item.logprobs))
        case RequestOpened():
            text = item.text
            return 4 * _ITEM_BYTES + sum(4 * len(stop) + 5 for stop in text.stop) + 4 * len(text.context_token_ids)
        case RequestClosed():
            error = item.error.message if item.error else ""
            return 4 * _ITEM_BYTES + 4 * len(error) + 5 * len(item.usage.num_output_tokens)
