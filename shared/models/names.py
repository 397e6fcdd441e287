"""What a model may be called, and the folder that a name becomes."""

import re
from typing import Final

from shared.errors import ModelError

_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_LENGTH: Final = 200
_SEPARATOR: Final = "--"
"""Stands for the slash in folder names; it may not be in a name itself, so that every folder has one name."""


def is_name(text: str) -> bool:
    """Whether a model may be called so: `name` or `organisation/name` in plain characters."""
    parts = text.split("/")
    is_plain = len(parts) <= 2 and all(_PART.fullmatch(part) for part in parts)
    return (
        is_plain and _SEPARATOR not in text and ".." not in text and not text.endswith(".") and len(text) <= _MAX_LENGTH
    )


def check_name(name: str) -> str:
    """The name itself. Raises ModelError for what is none."""
    if not is_name(name):
        raise ModelError(
            f"{name!r} cannot name a model: a name is letters, digits, '.', '_' and '-', with at most one '/', "
            f"without '--' or '..', and at most {_MAX_LENGTH} characters"
        )
    return name


def folder_name(name: str) -> str:
    """The folder of a model inside the store: `organisation/name` becomes `organisation--name`."""
    return check_name(name).replace("/", _SEPARATOR)


def name_of_folder(folder: str) -> str:
    """The model whose folder this is."""
    return folder.replace(_SEPARATOR, "/")


def derive_name(text: str) -> str:
    """The nearest allowed name to a file's or folder's name. Raises ModelError if nothing is left of it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text)
    name = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", name)).strip("-._")
    return check_name(name[:_MAX_LENGTH])
