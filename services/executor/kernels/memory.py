"""Reading and writing single numbers at addresses, for kernels whose memory is not an array of Numba's."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.executor.kernels.jit import nested

_FLOAT = ir.FloatType()
_BYTE = ir.IntType(8)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def load_float(_typing_context: Any, _address: Any) -> Any:
    """The float32 at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _FLOAT.as_pointer()), align=4)

    return types.float32(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_float(_typing_context: Any, _address: Any, _number: Any) -> Any:
    """Write a float32 to an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_int64(_typing_context: Any, _address: Any, _number: Any) -> Any:
    """Write a 64-bit integer to an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_int64(_typing_context: Any, _address: Any) -> Any:
    """The 64-bit integer at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=8)

    return types.int64(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_half(_typing_context: Any, _address: Any) -> Any:
    """The float16 at an address, as float32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = builder.load(builder.inttoptr(arguments[0], ir.HalfType().as_pointer()), align=2)
        return builder.fpext(half, _FLOAT)

    return types.float32(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def load_byte(_typing_context: Any, _address: Any) -> Any:
    """The unsigned byte at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte = builder.load(builder.inttoptr(arguments[0], _BYTE.as_pointer()), align=1)
        return builder.zext(byte, ir.IntType(64))

    return types.int64(types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def cycles(_typing_context: Any) -> Any:
    """The processor's clock: counts up at a steady rate."""

    def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(64), [])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@nested
def plain(number: int) -> Any:
    """A number as int64. What is called with constants, with numbers of arrays and with addresses, which are unsigned,
    is compiled for each kind otherwise."""
    return np.int64(number)
