"""What is to be sent: to each gateway as few messages as carry it, to schedulers single ones. Sends nothing itself."""

from collections.abc import Iterable, Iterator

from shared.ids import InstanceId
from shared.messages import ChoiceText, Message, RequestClosed, TextProduced

_EVENT_BYTES = 128
"""What an event has besides text, tokens and log-probabilities."""
_ALTERNATIVE_BYTES = 96
_CLOSED_BYTES = 512

GatewayEvent = ChoiceText | RequestClosed


class Outbox:
    """Gathers events; `take` empties it."""

    def __init__(self, sender_id: InstanceId) -> None:
        self.sender_id = sender_id
        self._events: dict[InstanceId, list[GatewayEvent]] = {}
        self._messages: list[tuple[InstanceId, Message]] = []
        self._num_events = 0

    def __len__(self) -> int:
        """How many events wait."""
        return self._num_events

    def add_event(self, gateway_id: InstanceId, event: GatewayEvent) -> None:
        """A gateway learns this, after all that was added for it before."""
        self._events.setdefault(gateway_id, []).append(event)
        self._num_events += 1

    def add_message(self, instance_id: InstanceId, message: Message) -> None:
        """An instance gets this message."""
        self._messages.append((instance_id, message))
        self._num_events += 1

    def take(self, *, max_message_bytes: int) -> list[tuple[InstanceId, Message]]:
        """All messages with their receivers; nothing waits any more.

        No message is larger than `max_message_bytes`, by an upper estimate, unless a single event is.
        """
        messages, events = self._messages, self._events
        self._messages, self._events, self._num_events = [], {}, 0
        for gateway_id, of_gateway in events.items():
            messages += [(gateway_id, self._produced(batch)) for batch in _batches(of_gateway, max_message_bytes)]
        return messages

    def _produced(self, batch: list[GatewayEvent]) -> TextProduced:
        texts = tuple([event for event in batch if isinstance(event, ChoiceText)])
        return TextProduced(self.sender_id, texts, tuple([e for e in batch if isinstance(e, RequestClosed)]))


def _batches(events: Iterable[GatewayEvent], max_bytes: int) -> Iterator[list[GatewayEvent]]:
    batch: list[GatewayEvent] = []
    size = 0
    for event in events:
        event_size = _size(event)
        if batch and size + event_size > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += event_size
    yield batch


def _size(event: GatewayEvent) -> int:
    """An upper estimate of the bytes of an event."""
    if isinstance(event, RequestClosed):
        error = event.error.message if event.error else ""
        return _CLOSED_BYTES + 4 * len(error) + 5 * len(event.usage.num_output_tokens)
    size = _EVENT_BYTES + 4 * len(event.text) + 4 * len(event.token_ids)
    if event.logprobs:
        size += sum(_ALTERNATIVE_BYTES * (1 + len(position.top)) for position in event.logprobs)
    return size
