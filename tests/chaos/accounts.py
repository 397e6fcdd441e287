"""Whether the broker's books are right: one usage record of every request, with what its client got."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from shared import subjects
from shared.codec import Decoder
from shared.errors import LedgerUnavailable
from shared.messages import USAGE_LEDGER, UsageRecord
from shared.transport import Transport
from tests.chaos.history import Ending
from tests.chaos.progress import Record

_WITHIN_S: Final = 15.0
"""A killed gateway's requests are recorded by schedulers once they have noticed."""
_LOOK_S: Final = 0.25

Books = dict[str, list[UsageRecord]]
"""Every record, by request id, also those that say what another one has said."""


async def wrong_accounts(transport: Transport, records: Sequence[Record], since: float) -> list[str]:
    """What is wrong with the books of these streams; nothing as soon as nothing is. `since` is Unix time."""
    wrong = ["the books cannot be read"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            while wrong:
                with contextlib.suppress(LedgerUnavailable):
                    wrong = check_books(await _read(transport, since), records)
                if wrong:
                    await asyncio.sleep(_LOOK_S)
    return wrong


async def _read(transport: Transport, since: float) -> Books:
    decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
    books: Books = defaultdict(list)
    async for payload in transport.ledger(USAGE_LEDGER, subjects.USAGE).entries(since):
        record = decoder.decode(payload)
        books[record.request_id].append(record)
    return books


def check_books(books: Books, records: Sequence[Record]) -> list[str]:
    """What is wrong with the books, a line for each stream that they wrong."""
    wrong = []
    for record in records:
        end = next((event for event in record.events if isinstance(event, Ending)), None)
        for request_id in record.request_ids[-1:]:
            entries = books.get(request_id, [])
            if len(entries) != 1:
                wrong.append(f"{record.name}: {request_id} has {len(entries)} usage records")
            elif end is not None and (problem := _problem(entries[0], end)):
                wrong.append(f"{record.name}: the usage record of {request_id} {problem}")
    return wrong


def _problem(entry: UsageRecord, end: Ending) -> str:
    if entry.outcome != end.kind:
        return f"says {entry.outcome}, its client was told {end.kind}"
    recorded = entry.usage.num_prompt_tokens, sum(entry.usage.num_output_tokens)
    if end.usage is not None and recorded != end.usage:
        return f"says {recorded} tokens of prompt and output, its client was told {end.usage}"
    return ""


def now() -> float:
    """Unix time, a little back: the broker's clock rounds."""
    return time.time() - 1.0
