"""`exp(x)` in float32 for kernels: the same bits in a vector, alone, and on every processor.

The argument is split into n · ln 2 + r with |r| ≤ ln 2 / 2; a polynomial gives exp(r), and n goes into the exponent.
The error is at most 2 units in the last place. Below -87, where the true value leaves the normal numbers, the result is
that of -87; from 88.4 on it is infinite. Coefficients: Moshier's Cephes library, `expf`.
"""

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from services.executor.kernels.jit import inlined

_LOWEST: Final = np.float32(-87.0)
_HIGHEST: Final = np.float32(89.0)
_LOG2_E: Final = np.float32(1.44269504088896341)
_LN2_HIGH: Final = np.float32(0.693359375)
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_HALF: Final = np.float32(0.5)
_ONE: Final = np.float32(1.0)
_C0: Final = np.float32(1.9875691500e-4)
_C1: Final = np.float32(1.3981999507e-3)
_C2: Final = np.float32(8.3334519073e-3)
_C3: Final = np.float32(4.1665795894e-2)
_C4: Final = np.float32(1.6666665459e-1)
_C5: Final = np.float32(5.0000001201e-1)


@inlined
def exponential(x: np.float32) -> np.float32:
    """`exp(x)`; for kernels alone. A NaN stays one."""
    x = min(max(x, _LOWEST), _HIGHEST) if x == x else x  # a NaN differs from itself
    n = np.floor(x * _LOG2_E + _HALF)
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    y = _C0 * r + _C1
    y = y * r + _C2
    y = y * r + _C3
    y = y * r + _C4
    y = y * r + _C5
    y = y * (r * r) + r + _ONE
    return np.float32(y * _float_from_bits((np.int32(n) + np.int32(127)) << np.int32(23)))


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _float_from_bits(_typing_context: Any, _bits: Any) -> Any:
    """The float32 that an int32's bits represent."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate
