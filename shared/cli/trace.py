"""`shoal trace`: where a request's time went, hop by hop, from what the mesh itself remembers."""

import asyncio
import secrets
import sys
from pathlib import Path
from typing import Final
from urllib.parse import quote

import aiohttp
import click
import msgspec
from rich.console import Console

from shared.cli.mesh.find import nats_option
from shared.cli.mesh.gateway_url import find_gateway_url
from shared.cli.mesh.watch import connected, listen
from shared.cli.stream_client import Gateway, normalized_url, refusal, unreachable
from shared.cli.trace_picture import picture_of
from shared.errors import OperatorError
from shared.ids import InstanceId, RequestId
from shared.messages import Presence
from shared.telemetry.asking import Asking
from shared.telemetry.timeline import Timeline, timeline_of

_TIMEOUT: Final = aiohttp.ClientTimeout(total=10, connect=5)
_CONNECT_TIMEOUT_S: Final = 3.0
_LISTEN_S: Final = 1.2
"""Two beats of everybody."""
_WIDTH_OF_FILES: Final = 160

EXIT_UNKNOWN: Final = 1


@click.command(epilog="Exit status: 0 if the request is known, 1 if not, 2 if nobody can be asked.")
@click.argument("request_id")
@click.option("--steps", is_flag=True, help="List every step that the request took part in.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--url", help="Of a gateway.")
@click.option("--port", type=click.IntRange(1, 65_535), help="The gateway on this port of this machine.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="The key that the request came with.  [env: OPENAI_API_KEY]")
@click.option("--nats-url", help="Ask the mesh on this NATS server directly, about anybody's request.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that `shoal up` was given.")
def command(
    request_id: str,
    *,
    steps: bool,
    as_json: bool,
    url: str | None,
    port: int | None,
    api_key: str | None,
    nats_url: str | None,
    home: Path | None,
) -> None:
    """Show where a request's time went: running, ended, failed or refused.

    REQUEST_ID is what the gateway answered with, in the header X-Request-Id, or as request_id on a WebSocket. The mesh
    remembers the latest requests (SHOAL_TRACE_STORE_REQUESTS); no collector is needed.
    """
    if sum(option is not None for option in (url, port, nats_url)) > 1:
        raise click.UsageError("--url, --port and --nats-url exclude each other")
    if nats_url is not None:
        timeline = asyncio.run(_ask_mesh(nats_option(nats_url), RequestId(request_id), with_steps=steps))
    else:
        gateway = Gateway(normalized_url(url) if url else find_gateway_url(home, port), api_key)
        timeline = asyncio.run(_ask_gateway(gateway, request_id, with_steps=steps))
    if timeline is None:
        click.echo(f"shoal: nothing is known of {request_id}, or not any more", err=True)
        sys.exit(EXIT_UNKNOWN)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(timeline), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES, highlight=False)
    console.print(picture_of(timeline, console.width))


async def _ask_gateway(gateway: Gateway, request_id: str, *, with_steps: bool) -> Timeline | None:
    """What a gateway says; None if it knows nothing. Raises OperatorError if it cannot be asked."""
    address = f"{gateway.url}/v1/requests/{quote(request_id, safe='')}/trace?steps={str(with_steps).lower()}"
    async with aiohttp.ClientSession(timeout=_TIMEOUT, headers=gateway.headers) as session:
        try:
            async with session.get(address) as response:
                status, body = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise unreachable(gateway, error) from error
    if status == 404:
        return None
    if status != 200:
        raise refusal(gateway, status)
    try:
        return msgspec.json.decode(body, type=Timeline)
    except msgspec.MsgspecError as error:
        raise OperatorError(f"what answers at {gateway.url} is not a Shoal gateway of this version") from error


async def _ask_mesh(nats_url: str, request_id: RequestId, *, with_steps: bool) -> Timeline | None:
    """What all instances say; None if they know nothing. Raises OperatorError if the broker cannot be reached."""
    alive: set[InstanceId] = set()

    def on_beat(beat: Presence) -> None:
        (alive.discard if beat.is_leaving else alive.add)(beat.instance_id)

    async with connected(nats_url, timeout_s=_CONNECT_TIMEOUT_S) as transport:
        asking = Asking(InstanceId(f"cli-{secrets.token_hex(4)}"), transport)
        await asking.start()
        await listen(transport, on_beat)
        await asyncio.sleep(_LISTEN_S)
        answers = await asking.ask(request_id, alive)
    return timeline_of(request_id, answers, with_steps=with_steps)
