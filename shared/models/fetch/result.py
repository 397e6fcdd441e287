"""What every fetch ends in."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A complete GGUF file."""

    path: Path
    license_name: str | None = None


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    """A complete folder in Hugging Face's layout. `is_ours`: it was made for this pull and may be taken apart."""

    path: Path
    is_ours: bool
    license_name: str | None = None


Fetched: TypeAlias = FetchedFile | FetchedFolder
