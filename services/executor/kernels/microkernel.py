"""The inner loop of matrix products, written in LLVM's vector instructions so that its arithmetic is fixed.

`c[m, n] (+)= Σ_k a[m, k] · b[k, n]` for a few rows m and a few vectors of columns n, kept in registers. Each sum
runs over k from first to last, one fused multiply-add at a time, whatever rows and columns are computed beside it: the
result for a row has the same bits in a tile of one row and in a tile of six, with any number of threads, and on every
processor (LLVM splits the vectors where they are wider than the machine's).

Owns no memory layout: the strides of a, b and c are arguments.
"""

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.executor.kernels.jit import Floats, inlined

LANES: Final = 16
"""Numbers in a vector: one AVX-512 register, two of AVX2, four of NEON."""
ROW_TILE: Final = 6
"""With four vectors of columns: 24 sums, 4 vectors of b and a factor fit the 32 registers of AVX-512."""

_HAS_AVX512: Final = bool(llvm.get_host_cpu_features().get("avx512f"))
_FIT: Final = 6
"""Sums of as many vectors that fit other processors' registers: 12 of the 16 of AVX2, 24 of the 32 of NEON."""

Product = Callable[[Floats, int, int, Any, int, int, int, Floats, int, int, int], None]

_FLOAT: Final = ir.FloatType()
_INT: Final = ir.IntType(64)
_VECTOR: Final = ir.VectorType(_FLOAT, LANES)
_POINTER: Final[Any] = types.CPointer(types.float32)  # type: ignore[attr-defined]  # made at run time
_HALF_POINTER: Final[Any] = types.CPointer(types.uint16)  # type: ignore[attr-defined]
_HALVES: Final = ir.VectorType(ir.IntType(16), LANES)
_BITS: Final = ir.VectorType(ir.IntType(32), LANES)


def make_product(num_vectors: int, *, accumulate: bool, bfloat16: bool = False) -> Product:
    """A function for kernels that multiplies any number of rows with `num_vectors · LANES` columns.

    Its arguments are a, a_offset, a_stride, b, b_offset, b_stride, num_k, c, c_offset, c_stride, num_rows: contiguous
    float32 arrays, each read as a matrix from number `offset` on with rows `stride` numbers apart. With `accumulate`
    the sums start from c's numbers, else from zero. `num_k` must be at least 1. With `bfloat16`, b holds the upper
    halves of float32 numbers, as uint16.
    """
    rows6, rows4, rows3, rows2, rows1 = (
        _make_microkernel(num_rows, num_vectors, accumulate, bfloat16) for num_rows in (ROW_TILE, 4, 3, 2, 1)
    )

    @inlined
    def product(
        a: Floats,
        a_offset: int,
        a_stride: int,
        b: Floats,
        b_offset: int,
        b_stride: int,
        num_k: int,
        c: Floats,
        c_offset: int,
        c_stride: int,
        num_rows: int,
    ) -> None:
        b_start = _address(b, b_offset)
        row = 0
        while num_rows - row >= 6:
            a_row, c_row = _address(a, a_offset + row * a_stride), _address(c, c_offset + row * c_stride)
            rows6(a_row, a_stride, b_start, b_stride, num_k, c_row, c_stride)
            row += 6
        if num_rows - row >= 4:
            a_row, c_row = _address(a, a_offset + row * a_stride), _address(c, c_offset + row * c_stride)
            rows4(a_row, a_stride, b_start, b_stride, num_k, c_row, c_stride)
            row += 4
        a_row, c_row = _address(a, a_offset + row * a_stride), _address(c, c_offset + row * c_stride)
        if num_rows - row == 3:
            rows3(a_row, a_stride, b_start, b_stride, num_k, c_row, c_stride)
        elif num_rows - row == 2:
            rows2(a_row, a_stride, b_start, b_stride, num_k, c_row, c_stride)
        elif num_rows - row == 1:
            rows1(a_row, a_stride, b_start, b_stride, num_k, c_row, c_stride)

    return product


def _make_microkernel(num_rows: int, num_vectors: int, accumulate: bool, bfloat16: bool) -> Any:
    """A function `(a, a_stride, b, b_stride, num_k, c, c_stride)` on addresses, for just so many rows and vectors."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def microkernel(
        _typing_context: Any, _a: Any, _a_stride: Any, _b: Any, _b_stride: Any, _num_k: Any, _c: Any, _c_stride: Any
    ) -> Any:
        b_pointer = _HALF_POINTER if bfloat16 else _POINTER
        signature = types.void(_POINTER, types.intp, b_pointer, types.intp, types.intp, _POINTER, types.intp)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            a, a_stride, b, b_stride, num_k, c, c_stride = arguments
            a_rows = [builder.gep(a, [builder.mul(a_stride, _INT(m))]) for m in range(num_rows)]
            c_rows = [builder.gep(c, [builder.mul(c_stride, _INT(m))]) for m in range(num_rows)]
            width = _width(num_rows, num_vectors)
            for first in range(0, num_vectors, width):
                at_once = range(first, first + width)
                _multiply(builder, a_rows, b, b_stride, num_k, c_rows, at_once, accumulate, bfloat16)
            return context.get_dummy_value()

        return signature, generate

    return microkernel


def _width(num_rows: int, num_vectors: int) -> int:
    """How many vectors of columns are computed at once: as many as there are registers for."""
    if _HAS_AVX512:
        return num_vectors
    return max(width for width in range(1, num_vectors + 1) if num_vectors % width == 0 and num_rows * width <= _FIT)


def _multiply(
    builder: Any,
    a_rows: list[Any],
    b: Any,
    b_stride: Any,
    num_k: Any,
    c_rows: list[Any],
    vectors: range,
    accumulate: bool,
    bfloat16: bool,
) -> None:
    """All rows, for some vectors of columns."""
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    starts = [[_load(builder, row, n) if accumulate else zero for n in vectors] for row in c_rows]
    before, loop, after = builder.block, builder.append_basic_block("k"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    k = builder.phi(_INT)
    k.add_incoming(_INT(0), before)
    sums = [[builder.phi(_VECTOR) for _ in vectors] for _ in c_rows]
    b_row = builder.gep(b, [builder.mul(k, b_stride)])
    load = _load_bfloat16 if bfloat16 else _load
    b_vectors = [load(builder, b_row, n) for n in vectors]
    totals = []
    for row, row_sums in zip(a_rows, sums, strict=True):
        factor = _broadcast(builder, builder.load(builder.gep(row, [k])))
        totals.append([_fma(builder, factor, *pair) for pair in zip(b_vectors, row_sums, strict=True)])
    for row_sums, row_starts, row_totals in zip(sums, starts, totals, strict=True):
        for phi, start, total in zip(row_sums, row_starts, row_totals, strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(total, loop)
    next_k = builder.add(k, _INT(1))
    k.add_incoming(next_k, loop)
    builder.cbranch(builder.icmp_signed("<", next_k, num_k), loop, after)
    builder.position_at_end(after)
    for row, row_totals in zip(c_rows, totals, strict=True):
        for n, total in zip(vectors, row_totals, strict=True):
            builder.store(total, _vector_pointer(builder, row, n), align=4)


@intrinsic  # type: ignore[untyped-decorator]
def _address(_typing_context: Any, array: Any, _offset: Any) -> Any:
    """The address of number `offset` of a contiguous array of float32 or uint16."""
    signature = (_HALF_POINTER if array.dtype == types.uint16 else _POINTER)(array, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.gep(data, [arguments[1]])

    return signature, generate


def _vector_pointer(builder: Any, row: Any, index: int) -> Any:
    return builder.bitcast(builder.gep(row, [_INT(index * LANES)]), _VECTOR.as_pointer())


def _load(builder: Any, row: Any, index: int) -> Any:
    return builder.load(_vector_pointer(builder, row, index), align=4)


def _load_bfloat16(builder: Any, row: Any, index: int) -> Any:
    """16 numbers whose lower halves are zero."""
    pointer = builder.bitcast(builder.gep(row, [_INT(index * LANES)]), _HALVES.as_pointer())
    wide = builder.zext(builder.load(pointer, align=2), _BITS)
    return builder.bitcast(builder.shl(wide, ir.Constant(_BITS, [16] * LANES)), _VECTOR)


def _broadcast(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.IntType(32)(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [x, y, z])
