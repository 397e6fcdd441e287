"""`shoal usage`: what the requests of a mesh have consumed, from the records that its broker keeps."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
import msgspec

from shared import subjects
from shared.cli.mesh.find import find_nats
from shared.cli.mesh.watch import connected
from shared.cli.usage_sums import UsageSums
from shared.codec import Decoder
from shared.errors import LedgerUnavailable, MessageError, OperatorError
from shared.ids import RequestId
from shared.messages import USAGE_LEDGER, UsageRecord
from shared.transport import Transport

_TIMEOUT_S: Final = 5.0
_CLOCKS_DIFFER_S: Final = 3600.0
"""A record is kept after its request has ended, by the broker's clock; who wrote it has another clock."""


@click.command()
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), help="Requests that ended on this day or later (UTC).")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), help="Requests that ended before this day (UTC).")
@click.option("--tenant", help="Requests of this tenant alone.")
@click.option("--model", help="Requests to this model alone.")
@click.option("--json", "as_json", is_flag=True, help="Print every record, a JSON object a line.")
@click.option("--port", type=click.IntRange(1, 65535), help="The mesh of `shoal up` on this port.")
@click.option("--nats-url", help="The mesh on this NATS server.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that it was started with.")
def command(
    since: datetime | None,
    until: datetime | None,
    tenant: str | None,
    model: str | None,
    *,
    as_json: bool,
    port: int | None,
    nats_url: str | None,
    home: Path | None,
) -> None:
    """Sum up what requests have consumed, for each day, tenant and model; with --json, list them.

    Every request that a scheduler accepted is counted once, however it ended, with the tokens that were delivered.
    """
    wanted = _Wanted(_unix(since), _unix(until), tenant, model)
    asyncio.run(_show(find_nats(nats_url, home, port), wanted, as_json=as_json))


class _Wanted(msgspec.Struct, frozen=True):
    """Which records matter; None does not restrict."""

    since: float | None
    until: float | None
    tenant: str | None
    model: str | None

    def has(self, record: UsageRecord) -> bool:
        return (
            (self.since is None or record.ended_at >= self.since)
            and (self.until is None or record.ended_at < self.until)
            and self.tenant in (None, record.tenant)
            and self.model in (None, record.model)
        )


def _unix(day: datetime | None) -> float | None:
    return None if day is None else day.replace(tzinfo=UTC).timestamp()


async def _show(nats_url: str, wanted: _Wanted, *, as_json: bool) -> None:
    sums = UsageSums()
    async with connected(nats_url, timeout_s=_TIMEOUT_S) as transport:
        try:
            async for record in read_records(transport, since=wanted.since):
                if wanted.has(record):
                    sums.add(record)
                    if as_json:
                        click.echo(_json(record))
        except (LedgerUnavailable, MessageError) as error:
            raise OperatorError(f"the usage records cannot be read: {error}") from error
    if as_json:
        return
    for line in sums.table():
        click.echo(line)
    if sums.is_empty:
        click.echo("no usage is recorded", err=True)


async def read_records(transport: Transport, *, since: float | None = None) -> AsyncIterator[UsageRecord]:
    """Every record once, in the order in which they were kept; without most of those from before `since`.

    Raises LedgerUnavailable, or MessageError for a record that cannot be read.
    """
    decoder: Decoder[UsageRecord] = Decoder(UsageRecord)
    seen: set[RequestId] = set()
    kept_since = None if since is None else since - _CLOCKS_DIFFER_S
    async for payload in transport.ledger(USAGE_LEDGER, subjects.USAGE).entries(kept_since):
        record = decoder.decode(payload)
        if record.request_id not in seen:
            seen.add(record.request_id)
            yield record


def _json(record: UsageRecord) -> str:
    usage = record.usage
    fields = {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "outcome": record.outcome,
        "error_code": record.error_code,
        "num_prompt_tokens": usage.num_prompt_tokens,
        "num_cached_tokens": usage.num_cached_tokens,
        "num_output_tokens": sum(usage.num_output_tokens),
        "num_choices": len(usage.num_output_tokens),
        "ended_at": datetime.fromtimestamp(record.ended_at, UTC).isoformat(timespec="milliseconds"),
        "recorded_by": record.recorded_by,
    }
    return msgspec.json.encode(fields).decode()
