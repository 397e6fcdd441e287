"""`shoal.json`: what a model folder says of itself. Written once, when the model enters the store."""

import datetime
import hashlib
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from shared.errors import ModelError
from shared.models.config import load_config
from shared.models.weights import check_weights, read_weights

FILE_NAME: Final = "shoal.json"
FORMAT_VERSION: Final = 1


class DamagedManifest(ModelError):
    """The manifest is missing, or is none."""


class ModelFile(msgspec.Struct, frozen=True):
    """One file of a model folder."""

    path: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A model in the store: what it is, where it came from, and its files."""

    format_version: int
    name: str
    source: str
    """As `shoal pull` would take it; never holds a secret."""
    pulled_at: datetime.datetime
    family: str
    num_parameters: int
    quantization: dict[str, int]
    """The number of parameters stored in each type: F32, F16, BF16 or a GGUF block type such as Q4_1."""
    license: str | None
    files: tuple[ModelFile, ...]

    @property
    def main_type(self) -> str:
        """The type in which most parameters are stored."""
        return max(self.quantization, key=lambda kind: self.quantization[kind], default="unknown")

    @property
    def size_bytes(self) -> int:
        """What the model takes on disk."""
        return sum(file.size_bytes for file in self.files)


def describe_folder(folder: Path, *, name: str, source: str, license_name: str | None) -> Manifest:
    """The manifest of a finished model folder, which is read whole for the checksums.

    Raises ModelError if it is not a model that can be served.
    """
    config = load_config(folder)
    weights = read_weights(folder)
    check_weights(weights, config)
    kinds: Counter[str] = Counter()
    for weight in weights.values():
        kinds[weight.kind] += weight.num_parameters
    return Manifest(
        format_version=FORMAT_VERSION,
        name=name,
        source=source,
        pulled_at=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        family=config.family,
        num_parameters=kinds.total(),
        quantization=dict(kinds.most_common()),
        license=license_name,
        files=tuple(
            ModelFile(path.name, path.stat().st_size, file_sha256(path))
            for path in sorted(folder.iterdir())
            if path.name != FILE_NAME
        ),
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put the manifest into its folder."""
    (folder / FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a model folder. Raises DamagedManifest, and ModelError if it is from a newer Shoal."""
    path = folder / FILE_NAME
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise ModelError(f"{path} was written by a newer Shoal (format {version}); this one reads {FORMAT_VERSION}")
        return msgspec.json.decode(text, type=Manifest)
    except FileNotFoundError:
        raise DamagedManifest(f"{path} is missing") from None
    except IsADirectoryError:
        raise DamagedManifest(f"{path} is a folder") from None
    except msgspec.MsgspecError as error:
        raise DamagedManifest(f"{path} is not a model's manifest: {error}") from error


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises ModelError that names the first file that is missing or has another size than it had."""
    for file in manifest.files:
        try:
            size = (folder / file.path).stat().st_size
        except FileNotFoundError:
            raise ModelError(f"{folder / file.path} is missing") from None
        if size != file.size_bytes:
            raise ModelError(f"{folder / file.path} has {size} bytes instead of {file.size_bytes}")


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Version(msgspec.Struct):
    format_version: int
