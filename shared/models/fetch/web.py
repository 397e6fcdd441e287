"""A GGUF file, an archive, or a model folder from a web server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from shared.errors import ModelError
from shared.models.fetch.archive import unpack_model
from shared.models.fetch.batch import download_all, download_gguf, download_model
from shared.models.fetch.connect import ACCESS_HINTS, connect_web
from shared.models.fetch.faults import Missing
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import Checksum, RemoteFile, look_up
from shared.models.fetch.result import Fetched, FetchedFile, FetchedFolder
from shared.models.fetch.selection import OPTIONAL, REQUIRED, WHOLE
from shared.models.progress import Progress
from shared.models.sources import ARCHIVE_SUFFIXES, WebSource
from shared.models.weights import INDEX

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def fetch_web(source: WebSource, folder: Path, progress: Progress, patience: Patience) -> Fetched:
    """Fetch into `folder`. Raises ModelError if what is there is no model, or cannot be had."""
    file = PurePosixPath(unquote(urlsplit(source.url).path)).name
    if file.endswith(".gguf"):
        remote = _single(source)
        return FetchedFile(asyncio.run(download_gguf(remote, folder, progress=progress, patience=patience)))
    if file.lower().endswith(ARCHIVE_SUFFIXES):
        asyncio.run(download_all([_single(source)], folder, progress=progress, patience=patience))
        progress.say(f"unpacking {file}")
        return unpack_model(folder / file, folder / "unpacked")
    if source.sha256 is not None:
        raise ModelError(f"{_public(source.url)}: a checksum can pin a GGUF file or an archive, not a folder")
    asyncio.run(_fetch_folder(source.url, folder, progress, patience))
    return FetchedFolder(folder, is_ours=True)


async def _fetch_folder(url: str, folder: Path, progress: Progress, patience: Patience) -> None:
    """A web server gives no listing, so it is asked for every file that a model may have."""
    parts = urlsplit(url)
    url = urlunsplit(parts._replace(path=parts.path.rstrip("/")))
    store = connect_web(url)
    asked = [_remote(store, url, name) for name in (*REQUIRED, *OPTIONAL, WHOLE, INDEX)]
    found = {
        remote.path: remote
        for remote in await asyncio.gather(*(_find(remote, patience) for remote in asked))
        if remote is not None
    }
    missing = [name for name in REQUIRED if name not in found]
    if missing or not found.keys() & {WHOLE, INDEX}:
        raise ModelError(f"{_public(url)} is not a model's folder: {(*missing, WHOLE)[0]} does not exist there")
    if WHOLE in found:
        found.pop(INDEX, None)
    else:
        await download_all([found[INDEX]], folder, progress=progress, patience=patience)
        found |= {name: _remote(store, url, name) for name in _shards(folder / INDEX)}
    await download_model(list(found.values()), folder, progress=progress, patience=patience)


async def _find(remote: RemoteFile, patience: Patience) -> RemoteFile | None:
    """The file with its size, or None if the server does not have it."""
    try:
        version = await look_up(remote, patience)
    except Missing:
        return None
    return replace(remote, size_bytes=version.size_bytes)


def _shards(index: Path) -> list[str]:
    """The files that an index of weights names. Raises ModelError for one that is no plain file name."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{index.name} is not an index of weights: {error}") from error
    for name in names:
        if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index.name} names {name!r}, which is not a file of the model's folder")
    return names


def _single(source: WebSource) -> RemoteFile:
    base_url, name = _split(source.url)
    return _remote(connect_web(base_url), base_url, name, source.sha256)


def _remote(store: "ObjectStore", base_url: str, name: str, sha256: str | None = None) -> RemoteFile:
    return RemoteFile(
        store=store,
        path=name,
        url=f"{_public(base_url).rstrip('/')}/{name}",
        access_hint=ACCESS_HINTS["web"],
        checksum=Checksum("sha256", sha256) if sha256 is not None else None,
    )


def _split(url: str) -> tuple[str, str]:
    """The address of the folder (with the query) and the file's name."""
    parts = urlsplit(url)
    parent, _, file = parts.path.rpartition("/")
    return urlunsplit((parts.scheme, parts.netloc, parent or "/", parts.query, "")), unquote(file)


def _public(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
