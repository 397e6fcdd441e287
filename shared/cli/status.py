"""`shoal status`: who is in a mesh, what waits, how fast it goes; live, or once."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from shared.cli.mesh.find import find_nats
from shared.cli.mesh.render import render
from shared.cli.mesh.view import MeshView, Snapshot, encode_json
from shared.cli.mesh.watch import connected, listen
from shared.clock import SystemClock
from shared.transport import Transport

_CONNECT_TIMEOUT_S = 3.0
_LISTEN_S = 1.2
"""Two beats of everybody."""
_REFRESH_S = 0.25
_WIDTH_OF_FILES = 200

EXIT_CANNOT_SERVE = 1


@click.command(epilog="Exit status: 0 if a request would be served, 1 if not, 2 if nobody can be asked.")
@click.option("--port", type=click.IntRange(1, 65_535), help="The mesh of `shoal up` on this port.")
@click.option("--nats-url", help="The mesh on this NATS server.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that it was started with.")
@click.option("--once", is_flag=True, help="Listen for a moment, print what is there, and exit.")
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C; with --json a line a second.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    port: int | None, nats_url: str | None, home: Path | None, *, once: bool, watch: bool, as_json: bool
) -> None:
    """Show a mesh's instances, queues and speed: live on a terminal, otherwise and with --json once.

    Without --port or --nats-url, shows the mesh on SHOAL_NATS_URL, else the only one of `shoal up` on this machine.
    """
    if once and watch:
        raise click.UsageError("--once and --watch exclude each other")
    logging.getLogger().addHandler(logging.NullHandler())  # what matters is shown
    url = find_nats(nats_url, home, port)
    if not watch and (once or as_json or not sys.stdout.isatty()):
        sys.exit(asyncio.run(_show_once(url, as_json=as_json)))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_stream(url, as_json=as_json) if as_json or not sys.stdout.isatty() else _show_live(url))


@contextlib.asynccontextmanager
async def _watching(nats_url: str) -> AsyncIterator[tuple[Transport, MeshView]]:
    view = MeshView(SystemClock())
    async with connected(nats_url, timeout_s=_CONNECT_TIMEOUT_S) as transport:
        await listen(transport, view.observe)
        yield transport, view


async def _show_once(nats_url: str, *, as_json: bool) -> int:
    async with _watching(nats_url) as (_, view):
        await asyncio.sleep(_LISTEN_S)
        snapshot = view.snapshot()
    _print(snapshot, as_json=as_json)
    return 0 if snapshot.can_serve else EXIT_CANNOT_SERVE


async def _stream(nats_url: str, *, as_json: bool) -> None:
    async with _watching(nats_url) as (transport, view):
        while True:
            await asyncio.sleep(1.0)
            if transport.is_connected:
                view.tick()
            _print(view.snapshot(), as_json=as_json)


def _print(snapshot: Snapshot, *, as_json: bool) -> None:
    if as_json:
        click.echo(encode_json(snapshot))
        return
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_FILES)
    console.print(render(snapshot, console.width))


async def _show_live(nats_url: str) -> None:
    async with _watching(nats_url) as (transport, view):
        with Live("Listening …", auto_refresh=False) as live:
            await asyncio.sleep(_LISTEN_S)
            while True:
                await asyncio.sleep(_REFRESH_S)
                if transport.is_connected:
                    view.tick()
                picture = render(view.snapshot(), live.console.width, is_connected=transport.is_connected)
                live.update(picture, refresh=True)
