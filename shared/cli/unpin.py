"""`shoal unpin`: let a pinned prefix go."""

import asyncio
from pathlib import Path

import click

from shared.cli.mesh.find import find_nats
from shared.cli.mesh.pins import MeshPins
from shared.cli.mesh.watch import connected

_TIMEOUT_S = 5.0


@click.command()
@click.argument("name")
@click.option("--port", type=click.IntRange(1, 65535), help="The mesh of `shoal up` on this port.")
@click.option("--nats-url", help="The mesh on this NATS server.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="The --home that it was started with.")
def command(name: str, port: int | None, nats_url: str | None, home: Path | None) -> None:
    """Let what `shoal pin NAME` pinned go when its room is needed."""
    asyncio.run(_unpin(find_nats(nats_url, home, port), name))
    click.echo(f"{name} is pinned no longer")


async def _unpin(nats_url: str, name: str) -> None:
    async with connected(nats_url, timeout_s=_TIMEOUT_S) as transport:
        await MeshPins(transport).delete(name)
