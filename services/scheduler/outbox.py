"""What is collected for one detokenizer until it is sent, in messages that the broker carries."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from shared.ids import RequestId
from shared.messages import ChoiceTokens, RequestClosed, RequestOpened, ResumedChoice, int32s

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
class Outbox:
    """What one detokenizer is told next."""

    opened: list[RequestOpened] = field(default_factory=list)
    tokens: list[ChoiceTokens] = field(default_factory=list)
    closed: list[RequestClosed] = field(default_factory=list)

    def add_all(self, opened: RequestOpened, log: Iterable[ResumedChoice], closed: RequestClosed | None) -> None:
        """Say all of a request."""
        self.opened.append(opened)
        self.tokens += _entries(opened.request_id, log)
        if closed is not None:
            self.closed.append(closed)

    def discard(self, request_id: RequestId) -> None:
        """Say nothing of a request."""
        self.opened = [each for each in self.opened if each.request_id != request_id]
        self.tokens = [each for each in self.tokens if each.request_id != request_id]
        self.closed = [each for each in self.closed if each.request_id != request_id]

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


def _entries(request_id: RequestId, log: Iterable[ResumedChoice]) -> Iterator[ChoiceTokens]:
    """The whole log of a request's choices, in entries that are small enough for any message."""
    for index, choice in enumerate(log):
        num_tokens = len(choice.token_ids)
        for start in range(0, num_tokens, _ENTRY_TOKENS):
            is_last = start + _ENTRY_TOKENS >= num_tokens
            yield ChoiceTokens(
                request_id,
                index,
                start,
                choice.token_ids[start : start + _ENTRY_TOKENS],
                choice.finish_reason if is_last else None,
                tuple(choice.logprobs[start : start + _ENTRY_TOKENS]),
            )
        if num_tokens == 0 and choice.finish_reason is not None:
            yield ChoiceTokens(request_id, index, 0, int32s(), choice.finish_reason)


def _batches(items: Sequence[_Item], max_bytes: int) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    size = _MESSAGE_BYTES
    for item in items:
        item_size = _size(item)
        if batch and size + item_size > max_bytes:
            yield batch
            batch, size = [], _MESSAGE_BYTES
        batch.append(item)
        size += item_size
    if batch:
        yield batch


def _size(item: _Item) -> int:
    """What an item takes in a message, at most."""
    match item:
        case ChoiceTokens():
            num_alternatives = sum(1 + len(each.top_logprobs) for each in item.logprobs if each is not None)
            return _ITEM_BYTES + 4 * len(item.token_ids) + 16 * (num_alternatives + len(item.logprobs))
        case RequestOpened():
            text, state = item.text, item.trace.state if item.trace is not None else ""
            num_stop_bytes = sum(4 * len(stop) + 5 for stop in text.stop)
            return 4 * _ITEM_BYTES + num_stop_bytes + 4 * len(text.context_token_ids) + len(state)
        case RequestClosed():
            error = item.error.message if item.error else ""
            return 4 * _ITEM_BYTES + 4 * len(error) + 5 * len(item.usage.num_output_tokens)
