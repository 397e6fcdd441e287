"""Several remote files into one folder: room checked first, a few at a time, each with its own progress."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.fetch.disk import require_space
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import RemoteFile, look_up
from shared.models.fetch.transfer import download
from shared.models.progress import Progress

_MAX_AT_ONCE: Final = 4
"""Enough to fill a fast line with servers that limit each connection."""


async def download_all(
    remotes: Sequence[RemoteFile], folder: Path, *, progress: Progress, patience: Patience, spare_bytes: int = 0
) -> None:
    """Have every file in `folder`, which exists, under the last part of its path.

    Raises ModelError if one cannot be had, or if the files and `spare_bytes` more do not fit on the disk.
    """
    sizes = await asyncio.gather(*(_size(remote, patience) for remote in remotes))
    missing = sum(size - _present(folder / _name(remote)) for remote, size in zip(remotes, sizes, strict=True))
    require_space(folder, max(missing, 0) + spare_bytes, "the model")
    places = asyncio.Semaphore(_MAX_AT_ONCE)

    async def fetch(remote: RemoteFile, size: int) -> None:
        async with places:
            with progress.transfer(_name(remote), size) as meter:
                await download(remote, folder / _name(remote), patience=patience, meter=meter)

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for remote, size in zip(remotes, sizes, strict=True):
                group.create_task(fetch(remote, size))
    except* ModelError as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        raise failure


async def download_model(
    remotes: Sequence[RemoteFile], folder: Path, *, progress: Progress, patience: Patience
) -> None:
    """`download_all` for a model folder: first config.json alone, to refuse early what cannot be served anyway."""
    first = [remote for remote in remotes if _name(remote) == "config.json"]
    await download_all(first, folder, progress=progress, patience=patience)
    load_config(folder)
    rest = [remote for remote in remotes if remote not in first]
    await download_all(rest, folder, progress=progress, patience=patience)


async def download_gguf(remote: RemoteFile, folder: Path, *, progress: Progress, patience: Patience) -> Path:
    """One GGUF file in `folder`, with room left for its conversion. The path of the file."""
    size = await _size(remote, patience)
    await download_all([remote], folder, progress=progress, patience=patience, spare_bytes=size)
    return folder / _name(remote)


async def _size(remote: RemoteFile, patience: Patience) -> int:
    return remote.size_bytes if remote.size_bytes is not None else (await look_up(remote, patience)).size_bytes


def _name(remote: RemoteFile) -> str:
    return remote.path.rpartition("/")[2]


def _present(target: Path) -> int:
    return max(
        (path.stat().st_size for path in (target, target.with_name(target.name + ".part")) if path.exists()), default=0
    )
