"""A model folder or a GGUF file from S3, Google Cloud Storage or Azure."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import obstore

from shared.errors import ModelError
from shared.models.fetch.batch import download_gguf, download_model
from shared.models.fetch.connect import ACCESS_HINTS, connect_bucket
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import Checksum, RemoteFile
from shared.models.fetch.result import Fetched, FetchedFile, FetchedFolder
from shared.models.fetch.selection import select
from shared.models.progress import Progress
from shared.models.sources import BucketSource

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def fetch_bucket(source: BucketSource, folder: Path, progress: Progress, patience: Patience) -> Fetched:
    """Fetch into `folder`. Raises ModelError if there is no model, no access, or no such bucket."""
    if source.url.endswith(".gguf"):
        prefix, _, file = source.url.rpartition("/")
        remote = _remote(connect_bucket(prefix), prefix, file, None, source.sha256)
        return FetchedFile(asyncio.run(download_gguf(remote, folder, progress=progress, patience=patience)))
    if source.sha256 is not None:
        raise ModelError(f"{source.url}: a checksum can pin a GGUF file, not a folder")
    store = connect_bucket(source.url)
    sizes = asyncio.run(_list(store, source.url, patience))
    selection = select(sizes, source.url)
    remotes = [_remote(store, source.url, name, sizes[name]) for name in selection.files]
    if selection.is_gguf:
        return FetchedFile(asyncio.run(download_gguf(remotes[0], folder, progress=progress, patience=patience)))
    asyncio.run(download_model(remotes, folder, progress=progress, patience=patience))
    return FetchedFolder(folder, is_ours=True)


async def _list(store: "ObjectStore", url: str, patience: Patience) -> dict[str, int]:
    """The objects directly under the prefix, with their sizes in bytes."""
    listing = await patience.persist(
        lambda: obstore.list_with_delimiter_async(store), url=url, access_hint=ACCESS_HINTS[url.partition(":")[0]]
    )
    sizes = {meta["path"]: meta["size"] for meta in listing["objects"]}
    if not sizes:
        raise ModelError(f"there is nothing at {url}")
    return sizes


def _remote(
    store: "ObjectStore", base_url: str, name: str, size_bytes: int | None, sha256: str | None = None
) -> RemoteFile:
    return RemoteFile(
        store=store,
        path=name,
        url=f"{base_url}/{name}",
        access_hint=ACCESS_HINTS[base_url.partition(":")[0]],
        size_bytes=size_bytes,
        checksum=Checksum("sha256", sha256) if sha256 is not None else None,
    )
