"""`shoal models`: what is in the store."""

import os
from collections.abc import Sequence

import click
import msgspec

from shared import config as settings
from shared.config import MeshConfig
from shared.models.manifest import Manifest
from shared.models.sources import ALIASES
from shared.models.store import ModelStore
from shared.models.units import show_bytes, show_parameters

_COLUMNS = ("name", "family", "parameters", "stored as", "size", "source", "pulled")


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
        store.remove(remove)
        click.echo(f"{remove} is removed")
    elif as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(store.list()), indent=2))
    else:
        _print(store)


def _print(store: ModelStore) -> None:
    models = store.list()
    if models:
        _print_table(models)
    else:
        click.echo(f"no models in {store.home} yet; `shoal pull {min(ALIASES)}` fetches a small one")
    for name in store.unfinished():
        size = sum(path.stat().st_size for path in store.partial(name).rglob("*") if path.is_file())
        click.echo(
            f"unfinished: {name} ({show_bytes(size)} so far); the same `shoal pull` goes on with it, "
            f"`shoal models --remove {name}` deletes it"
        )


def _print_table(models: Sequence[Manifest]) -> None:
    rows = [_COLUMNS, *(_row(model) for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(model: Manifest) -> tuple[str, ...]:
    return (
        model.name,
        model.family,
        show_parameters(model.num_parameters),
        model.main_type,
        show_bytes(model.size_bytes),
        model.source,
        model.pulled_at.astimezone().strftime("%Y-%m-%d %H:%M"),
    )
