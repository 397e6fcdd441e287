"""What Shoal asks of a broker for its books: records that are kept in order, each once however often it is said."""

from collections.abc import AsyncIterator
from typing import Protocol


class Ledger(Protocol):
    """Records that outlive every process. Nothing in it is ever changed.

    Every call may raise LedgerUnavailable; a record may have been kept nevertheless, so say it again.
    """

    async def append(self, record_id: str, payload: bytes) -> None:
        """Keep a record, and return when the broker has it; one whose id it kept lately it keeps no second time.

        Lately is an hour: beyond it, whoever reads passes over ids that were there before. Raises PayloadTooLarge for
        a record that no repetition would get through.
        """
        ...

    def entries(self, since: float | None = None) -> AsyncIterator[bytes]:
        """The records, oldest first; of those kept before `since`, in seconds of Unix time, none."""
        ...
