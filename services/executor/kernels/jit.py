"""How kernels are compiled: by Numba, once, kept on disk, and without any licence to reorder arithmetic.

Compiled code is kept in a folder named after the sources of all kernels together: Numba itself looks only at the file
of the outermost function, and would go on using what an inner one was before. The folder is beside the sources, or
where NUMBA_CACHE_DIR says, or, where neither can be written, the user's cache. Kernels release Python's lock.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

from shared.errors import OperatorError

P = ParamSpec("P")
R = TypeVar("R")

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

_SOURCES: Final = Path(__file__).parent


def cache_folder(sources: Path, environ: Mapping[str, str]) -> Path:
    """Where the compiled code of the kernels in `sources` is kept; that of other versions beside it is removed."""
    digest = sha256()
    for path in sorted(sources.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}"
    for parent in _places(sources, environ):
        folder = parent / name
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                for old in parent.glob("kernels-*"):
                    if old != folder:
                        shutil.rmtree(old, ignore_errors=True)
                return folder
    raise OperatorError("compiled kernels can be kept nowhere; name a folder that can be written in NUMBA_CACHE_DIR")


def _places(sources: Path, environ: Mapping[str, str]) -> list[Path]:
    beside = () if "NUMBA_CACHE_DIR" in environ else (sources / "__pycache__",)
    return [*beside, user_cache(environ)]


def user_cache(environ: Mapping[str, str]) -> Path:
    """The folder for what can be made again: NUMBA_CACHE_DIR, or shoal's in the user's cache."""
    if "NUMBA_CACHE_DIR" in environ:
        return Path(environ["NUMBA_CACHE_DIR"])
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


USER_CACHE: Final = user_cache(os.environ)
numba.config.CACHE_DIR = str(cache_folder(_SOURCES, os.environ))


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function called from Python; its `prange` loops run on this thread's number of threads."""
    compiled: Callable[P, R] = numba.njit(nogil=True, parallel=True, cache=True, error_model="numpy")(function)
    return compiled


def single(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that runs on the thread that calls it, from Python or from another kernel."""
    compiled: Callable[P, R] = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    return compiled


def nested(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into each kernel that calls it, as a function of its own. Only what Python calls is kept on
    disk; and what Python calls must be no closure, else it is never found there."""
    compiled: Callable[P, R] = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into each kernel that calls it."""
    compiled: Callable[P, R] = numba.njit(inline="always", error_model="numpy")(function)
    return compiled


def use_threads(num_threads: int) -> None:
    """Have kernels, and torch, that the calling thread runs use so many threads."""
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
