"""Packed weights kept on disk and mapped into memory: made by the first start, read by all later ones.

Owns where they are kept, when they still fit the model and this program, and that several executors may make them at
once. What is in them is `models.packing`'s. Pages of a mapped file are the system's: executors on one machine share
them, and a start reads only what it touches.

    <place>/<format>-<digest>/   arrays.bin, index.json; whole, for it got this name when all was written
    <place>/making-…/            being written, or left by a process that died
    <place>/lock                 held by the one process that writes

The place is `packed/` in the model's own folder, so that the arrays go when the model goes, or, where that cannot be
written, `packed/<model>/` in the folder that also has compiled kernels. The digest covers the weights' files and the
sources of what packs them.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from services.executor.memory import untouched
from shared.models import config

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_PACKERS: Final = (
    "kernels/grouped_linear.py",
    "kernels/quantize.py",
    "kernels/row_linear.py",
    "kernels/row_quantize.py",
    "models/packing.py",
    "models/row_packing.py",
    "packed.py",
    "quantization/gguf_blocks.py",
    "quantization/groups.py",
    "quantization/rotation.py",
    "weights.py",
)
"""Sources, of which any change may change what is packed."""
_DATA: Final = "arrays.bin"
_INDEX: Final = "index.json"
"""Where each array is in the data: {name: [type, shape, first byte]}. Written last."""
_LINE: Final = 64
"""Each array begins at a multiple of so many bytes, as kernels want it."""
_UNUSED_AFTER_S: Final = 86_400.0
"""Arrays of another version of the model or of this program, which executors of that version may still start with."""


class PackedWeights:
    """The arrays of one model in one format, kept at the first place that can be written."""

    def __init__(self, folder: Path, weight_format: str, cache: Path) -> None:
        """`folder` is the model's; `cache` is for what can be made again, of all models."""
        self._format = weight_format
        self._name = f"{weight_format}-{_digest(folder)}"
        of_model = f"{folder.name}-{sha256(os.fsencode(folder.absolute())).hexdigest()[:8]}"
        self._places = folder / "packed", cache / "packed" / of_model

    def find(self) -> Mapping[str, Array] | None:
        """The arrays if they are kept, mapped into memory; None if they have to be made."""
        return next((found for place in self._places if (found := self._find_at(place)) is not None), None)

    def keep(self, make: Callable[[], Iterable[tuple[str, Array]]], num_bytes: int) -> Mapping[str, Array]:
        """What `make` makes, at most `num_bytes`, mapped, or in memory if no place has room for it.

        Where another executor packs at this moment, its arrays are waited for. What `make` raises is raised, and
        nothing is kept then.
        """
        for place in self._places:
            try:
                with _held(place):
                    _remove_left_over(place)
                    if (found := self._find_at(place)) is not None:
                        return found
                    if shutil.disk_usage(place).free < 2 * num_bytes:
                        continue
                    return self._write(place, make())
            except OSError as error:
                log.warning("packed weights cannot be kept", extra={"folder": str(place), "error": str(error)})
        return in_memory(make())

    def _find_at(self, place: Path) -> Mapping[str, Array] | None:
        kept = place / self._name
        if not kept.is_dir():
            return None
        try:
            found = _map(kept)
        except (FileNotFoundError, ValueError) as error:
            log.warning("packed weights are damaged and are made again", extra={"error": str(error)})
            _remove(kept)
            return None
        except OSError as error:  # of this process, as too many open files, or of the disk
            log.warning("packed weights cannot be read", extra={"folder": str(kept), "error": str(error)})
            return None
        with contextlib.suppress(OSError):  # it may be for reading only
            os.utime(kept)
        return found

    def _write(self, place: Path, arrays: Iterable[tuple[str, Array]]) -> Mapping[str, Array]:
        making = Path(tempfile.mkdtemp(prefix="making-", dir=place))
        making.chmod(stat.S_IMODE(place.stat().st_mode))  # who may read the place may read what is in it
        try:
            index: dict[str, tuple[str, tuple[int, ...], int]] = {}
            with (making / _DATA).open("xb") as data:
                for name, array in arrays:
                    data.write(bytes(-data.tell() % _LINE))
                    index[name] = array.dtype.str, array.shape, data.tell()
                    data.write(np.ascontiguousarray(array).data)
                _flush(data)
            with (making / _INDEX).open("xb") as file:
                file.write(json.dumps(index).encode())
                _flush(file)
            found = _map(making)
            making.rename(place / self._name)
        finally:
            shutil.rmtree(making, ignore_errors=True)
        self._remove_unused(place)
        return found

    def _remove_unused(self, place: Path) -> None:
        for other in place.glob(f"{self._format}-*"):
            with contextlib.suppress(OSError):
                if other.name != self._name and time.time() - other.stat().st_mtime > _UNUSED_AFTER_S:
                    _remove(other)


@contextlib.contextmanager
def _held(place: Path) -> Iterator[None]:
    """Keep other executors from writing at a place. Raises OSError if it cannot be written."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_left_over(place: Path) -> None:
    """Remove what a process left that died while it wrote. The place is held."""
    for left in place.glob("making-*"):
        shutil.rmtree(left, ignore_errors=True)


def _remove(kept: Path) -> None:
    """Remove a folder, and never leave half of it under its name. Whoever has it mapped keeps what is mapped."""
    with contextlib.suppress(OSError):
        doomed = kept.with_name(f"making-{kept.name}-{time.time_ns()}")
        kept.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _map(folder: Path) -> Mapping[str, Array]:
    """The arrays in a folder. Raises OSError if it cannot be read, ValueError if it is damaged."""
    index = json.loads((folder / _INDEX).read_bytes())
    data = np.memmap(folder / _DATA, np.uint8, mode="r")
    found: dict[str, Array] = {}
    for name, (kind, shape, first) in index.items():
        dtype = np.dtype(kind)
        found[name] = data[first : first + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    return found


def in_memory(arrays: Iterable[tuple[str, Array]]) -> Mapping[str, Array]:
    """Copies of the arrays on cache lines."""
    held = {}
    for name, array in arrays:
        held[name] = np.frombuffer(untouched(array.nbytes), array.dtype, array.size).reshape(array.shape)
        held[name][...] = array
    return held


def _digest(folder: Path) -> str:
    digest = sha256(Path(config.__file__).read_bytes())
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors" or path.name == "model.safetensors.index.json":
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
        elif path.name == "config.json":
            digest.update(path.read_bytes())
    here = Path(__file__).parent
    for name in _PACKERS:
        digest.update((here / name).read_bytes())
    return digest.hexdigest()[:16]
