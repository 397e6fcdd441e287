"""How kernels are compiled: by Numba, once, kept on disk, and without any licence to reorder arithmetic.

Compiled code is kept beside the source, or where NUMBA_CACHE_DIR says. Kernels release Python's lock while they run.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch

P = ParamSpec("P")
R = TypeVar("R")

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function called from Python; its `prange` loops run on this thread's number of threads."""
    compiled: Callable[P, R] = numba.njit(nogil=True, parallel=True, cache=True, error_model="numpy")(function)
    return compiled


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into each kernel that calls it."""
    compiled: Callable[P, R] = numba.njit(inline="always", error_model="numpy")(function)
    return compiled


def use_threads(num_threads: int) -> None:
    """Have kernels, and torch, that the calling thread runs use so many threads."""
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
