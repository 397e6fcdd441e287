"""What Shoal asks of a broker beside messages: a few values that outlive every process, each under a key."""

from typing import Protocol


class Bucket(Protocol):
    """A small key-value store. Every call may raise BucketUnavailable; nothing is known then of what it did."""

    async def put(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`, which is letters, digits, `-` and `_`, instead of what was there."""
        ...

    async def delete(self, key: str) -> None:
        """Keep nothing under `key`."""
        ...

    async def entries(self) -> dict[str, bytes]:
        """All that is kept; nothing if nothing was ever kept."""
        ...
