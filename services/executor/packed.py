"""Packed weights kept on disk and mapped into memory: made by the first start, read by all later ones.

Owns where they are kept, when they still fit the model and this program, and that several executors may make them at
once. What is in them is `models.packing`'s. Pages of a mapped file are the system's: executors on one machine share
them, and a start reads only what it touches.

    <place>/<format>-<digest>/NAME.npy     whole: it got this name when all was written
    <place>/making-…/                      being written, or left by a process that died

The place is `packed/` in the model's own folder, so that the arrays go when the model goes, or, where that cannot be
written, `packed/<model>/` in the folder that also has compiled kernels. The digest covers the weights' files and the
sources of what packs them.
"""

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from services.executor.memory import untouched
from shared.models import config

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_PACKERS: Final = (
    "kernels/grouped_linear.py",
    "kernels/quantize.py",
    "models/packing.py",
    "packed.py",
    "quantization/gguf_blocks.py",
    "quantization/groups.py",
    "weights.py",
)
"""Sources, of which any change may change what is packed."""
_NAMES: Final = "names"
"""The file that lists all arrays of a folder, so that half a folder is not taken for a whole one."""
_ABANDONED_AFTER_S: Final = 3600.0


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
        for place in self._places:
            if (kept := place / self._name).is_dir():
                try:
                    return _map(kept)
                except (OSError, ValueError, EOFError) as error:
                    log.warning("packed weights are damaged and are made again", extra={"error": str(error)})
                    shutil.rmtree(kept, ignore_errors=True)
        return None

    def keep(self, make: Callable[[], Iterable[tuple[str, Array]]], num_bytes: int) -> Mapping[str, Array]:
        """What `make` makes, at most `num_bytes`, mapped, or in memory if no place has room for it.

        What `make` raises is raised, and nothing is kept then.
        """
        for place in self._places:
            if (making := _begin(place, num_bytes)) is not None:
                try:
                    return self._write(making, make())
                except (OSError, ValueError, EOFError) as error:
                    log.warning("packed weights cannot be kept", extra={"folder": str(place), "error": str(error)})
                finally:
                    shutil.rmtree(making, ignore_errors=True)
        return in_memory(make())

    def _write(self, making: Path, arrays: Iterable[tuple[str, Array]]) -> Mapping[str, Array]:
        for name, array in arrays:
            with (making / f"{name}.npy").open("xb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        names = sorted(path.name for path in making.iterdir())
        (making / _NAMES).write_text("\n".join(names))
        kept = making.with_name(self._name)
        with contextlib.suppress(OSError):  # another executor was faster, and its arrays are the same
            making.rename(kept)
        found = _map(kept)
        self._remove_older(kept)
        return found

    def _remove_older(self, kept: Path) -> None:
        for old in kept.parent.glob(f"{self._format}-*"):
            if old != kept:  # whoever has it mapped keeps what is mapped
                shutil.rmtree(old, ignore_errors=True)


def _begin(place: Path, num_bytes: int) -> Path | None:
    """A folder to write into, if one can be made and has room."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        for left in place.glob("making-*"):
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(left, ignore_errors=True)
        if shutil.disk_usage(place).free < 2 * num_bytes:
            return None
        return Path(tempfile.mkdtemp(prefix="making-", dir=place))
    except OSError:
        return None


def _map(kept: Path) -> Mapping[str, Array]:
    """What is in a folder. Data in these files begins at a multiple of 64 bytes, as kernels want it.

    Raises OSError if something of it is missing, ValueError or EOFError if it is damaged.
    """
    names = (kept / _NAMES).read_text().split("\n")
    return {name.removesuffix(".npy"): np.load(kept / name, mmap_mode="r") for name in names}


def in_memory(arrays: Iterable[tuple[str, Array]]) -> Mapping[str, Array]:
    """Copies of the arrays on cache lines."""
    held = {}
    for name, array in arrays:
        held[name] = np.frombuffer(untouched(array.nbytes), array.dtype, array.size).reshape(array.shape)
        held[name][...] = array
    return held


def _digest(folder: Path) -> str:
    digest = sha256((Path(config.__file__)).read_bytes())
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
