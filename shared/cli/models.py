"""`shoal models`: what is in the store."""

import os
import shutil
import sys
from collections.abc import Sequence

import click
import msgspec

from shared import config as settings
from shared.config import MeshConfig
from shared.models.manifest import Manifest
from shared.models.sources import ALIASES
from shared.models.store import ModelStore
from shared.models.units import show_bytes, show_parameters

_COLUMNS = ("name", "family", "parameters", "stored as", "size", "pulled", "source")
_NUM_NARROW_COLUMNS = 5
"""Of these, where the rest has no room: it goes below."""


@click.command
@click.option("--verify", metavar="NAME", help="Compare a model's files with their checksums.")
@click.option("--remove", metavar="NAME", help="Delete a model.")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(verify: str | None, remove: str | None, *, as_json: bool) -> None:
    """List the models in the store (SHOAL_HOME), verify one, or remove one."""
    if sum((verify is not None, remove is not None, as_json)) > 1:
        raise click.UsageError("--verify, --remove and --json exclude each other")
    store = ModelStore(settings.load(MeshConfig, os.environ).home)
    if verify is not None:
        found = store.verify(verify)
        click.echo(f"{verify} is intact: {len(found.files)} files, {show_bytes(found.size_bytes)}")
    elif remove is not None:
        store.remove(remove, lambda: click.echo(f"waiting for a pull of {remove}", err=True))
        click.echo(f"{remove} is removed")
    elif as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(store.list()), indent=2))
    else:
        _print(store)


def _print(store: ModelStore) -> None:
    models, unreadable, unfinished = store.list(), store.unreadable(), store.unfinished()
    if models:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in table([_row(model) for model in models], width):
            click.echo(line)
    elif not unreadable:
        click.echo(f"no models in {store.home} yet; `shoal pull {min(ALIASES)}` fetches a small one")
    for name, problem in unreadable.items():
        click.echo(f"unreadable: {name}: {problem}; `shoal models --remove {name}` deletes it")
    for name, num_bytes in unfinished.items():
        click.echo(
            f"unfinished: {name} ({show_bytes(num_bytes)} so far); the same `shoal pull` goes on with it, "
            f"`shoal models --remove {name}` deletes it"
        )


def table(models: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    """The lines of the table; where it has no room in `width`, source and date stand below each model."""
    lines = _aligned([_COLUMNS, *models])
    if width is None or max(map(len, lines)) <= width:
        return lines
    head, *narrow = _aligned([row[:_NUM_NARROW_COLUMNS] for row in (_COLUMNS, *models)])
    below = [f"  {source}, {pulled}" for *_, pulled, source in models]
    return [head, *(line for pair in zip(narrow, below, strict=True) for line in pair)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(model: Manifest) -> tuple[str, ...]:
    return (
        model.name,
        model.family,
        show_parameters(model.num_parameters),
        model.main_type,
        show_bytes(model.size_bytes),
        model.pulled_at.astimezone().strftime("%Y-%m-%d %H:%M"),
        model.source,
    )
