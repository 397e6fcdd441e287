"""A model folder or a GGUF file from Hugging Face, or from a server that speaks its protocol (`HF_ENDPOINT`).

huggingface_hub finds the repository, the credentials (`HF_TOKEN`, or a login) and the checksums. The bytes come
through our own transfer: its downloads do not go on where an earlier process was interrupted.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from shared.errors import ModelError
from shared.models.fetch.batch import download_gguf, download_model
from shared.models.fetch.connect import connect_web
from shared.models.fetch.patience import Patience
from shared.models.fetch.remote import Checksum, RemoteFile
from shared.models.fetch.result import Fetched, FetchedFile, FetchedFolder
from shared.models.fetch.selection import Selection, select
from shared.models.progress import Progress
from shared.models.sources import HubSource


@dataclass(frozen=True, slots=True)
class HubAccess:
    """Which server, with which token; by default those of huggingface_hub's own configuration."""

    endpoint: str | None = None
    token: str | None = None


def fetch_hub(source: HubSource, folder: Path, progress: Progress, patience: Patience, access: HubAccess) -> Fetched:
    """Fetch into `folder`. Raises ModelError if there is no such repository, no access, or no model in it."""
    api = huggingface_hub.HfApi(endpoint=access.endpoint, token=access.token)
    with _explained(source):
        info = api.model_info(source.repository, revision=source.revision, files_metadata=True)
    siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    license_name = _license(info)
    if source.file is not None:
        if source.file not in siblings:
            ggufs = ", ".join(name for name in siblings if name.endswith(".gguf")) or "none"
            raise ModelError(f"{source.repository} has no file {source.file} (GGUF files in it: {ggufs})")
        selection = Selection((source.file,), is_gguf=True)
    else:
        selection = select((name for name in siblings if "/" not in name), source.repository)
    token = access.token or huggingface_hub.get_token()
    base = f"{api.endpoint}/{source.repository}/resolve/{info.sha}"
    remotes = [_remote(base, siblings[name], token) for name in selection.files]
    if selection.is_gguf:
        path = asyncio.run(download_gguf(remotes[0], folder, progress=progress, patience=patience))
        return FetchedFile(path, license_name)
    asyncio.run(download_model(remotes, folder, progress=progress, patience=patience))
    return FetchedFolder(folder, is_ours=True, license_name=license_name)


def _remote(base: str, sibling: Any, token: str | None) -> RemoteFile:
    path = PurePosixPath(sibling.rfilename)
    if path.is_absolute() or ".." in path.parts or "\\" in sibling.rfilename:
        raise ModelError(f"{base} lists {sibling.rfilename!r}, which points outside of it; it is refused")
    parent = f"{base}/{quote(str(path.parent))}" if len(path.parts) > 1 else base
    return RemoteFile(
        store=connect_web(parent, authorization=f"Bearer {token}" if token else None),
        path=path.name,
        url=f"{base}/{sibling.rfilename}",
        access_hint="accept the model's terms on its page, then set HF_TOKEN or log in with `hf auth login`",
        size_bytes=sibling.size,
        checksum=_checksum(sibling),
        is_immutable=True,  # the address names the commit
    )


def _checksum(sibling: Any) -> Checksum | None:
    if sibling.lfs is not None:
        return Checksum("sha256", sibling.lfs.sha256)
    return Checksum("git-blob", sibling.blob_id) if sibling.blob_id else None


def _license(info: Any) -> str | None:
    card = info.card_data
    name = card.get("license") if card is not None else None
    return name if isinstance(name, str) else None


@contextlib.contextmanager
def _explained(source: HubSource) -> Iterator[None]:
    where = f"the Hugging Face repository {source.repository}"
    try:
        yield
    except GatedRepoError as error:
        raise ModelError(
            f"{where} is gated: accept its terms on its page, then set HF_TOKEN or log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{where} has no revision {source.revision}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{where} does not exist, or is private and HF_TOKEN is not set (a folder on this machine is written ./…)"
        ) from error
    except HFValidationError as error:
        raise ModelError(f"{source.repository!r} is not the name of a repository: {error}") from error
    except OfflineModeIsEnabled as error:
        raise ModelError(f"{where} cannot be reached: HF_HUB_OFFLINE is set") from error
    except HfHubHTTPError as error:
        raise ModelError(f"{where} cannot be read: {str(error).partition(chr(10))[0]}") from error
    except OSError as error:
        raise ModelError(f"{where} cannot be reached: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore")):
            raise
        raise ModelError(f"{where} cannot be reached: {error}; is there a network?") from error
