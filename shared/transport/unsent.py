"""What is published while there is no broker waits here, in order and up to a size."""

from collections import deque
from collections.abc import Mapping

from shared.errors import Disconnected
from shared.transport.protocol import num_bytes

Unsendable = tuple[str, bytes, Mapping[str, str] | None]
"""Subject, payload and headers."""


class Unsent:
    """Messages for a broker that is away."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._messages: deque[Unsendable] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, subject: str, payload: bytes, headers: Mapping[str, str] | None) -> None:
        """Keep one for later. Raises Disconnected if too much waits already."""
        size = _size(subject, payload, headers)
        if self._num_bytes + size > self._max_bytes:
            raise Disconnected(f"cannot send to {subject}: NATS is away, and too much waits for it already")
        self._num_bytes += size
        self._messages.append((subject, payload, headers))

    @property
    def oldest(self) -> Unsendable:
        """The one to send next."""
        return self._messages[0]

    def remove(self) -> None:
        """The oldest one is kept no longer."""
        self._num_bytes -= _size(*self._messages.popleft())

    def clear(self) -> None:
        """Forget all."""
        self._messages.clear()
        self._num_bytes = 0


def _size(subject: str, payload: bytes, headers: Mapping[str, str] | None) -> int:
    return len(subject) + num_bytes(payload, headers)
