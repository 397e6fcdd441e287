"""A vocabulary of vector instructions for kernels that are written in LLVM's own language.

A kernel that must give the same bits everywhere, or use an instruction that no compiler finds by itself, is a Numba
`@intrinsic` whose body is spelled out with a `Vectors`. Addresses are plain integers, so that memory of any layout is
reached by adding bytes. LLVM splits vectors where they are wider than the machine's.

Owns what each operation means to the bit. Owns no kernel.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.executor.kernels.loops import Loop

LANES: Final = 16
"""Numbers of 32 bits in a vector: one AVX-512 register, two of AVX2, four of NEON."""

DotInstruction = Literal["avx512-vnni", "avx-vnni", "avx2", "none"]

_I8: Final = ir.IntType(8)
_I16: Final = ir.IntType(16)
_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)
_F32: Final = ir.FloatType()
_F16: Final = ir.HalfType()
_FLOATS: Final = ir.VectorType(_F32, LANES)
_INTS: Final = ir.VectorType(_I32, LANES)
_BYTES: Final = ir.VectorType(_I8, 4 * LANES)
_SHORTS: Final = ir.VectorType(_I16, 2 * LANES)
_EIGHT: Final = ir.Constant(_SHORTS, [8] * (2 * LANES))


@functools.cache
def dot_instruction() -> DotInstruction:
    """The instruction of this processor that adds up products of bytes, four in each lane; with AVX2, of 16-bit
    integers, two in each."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512vnni"):
        return "avx512-vnni"
    if features.get("avxvnni"):
        return "avx-vnni"
    if features.get("avx2"):
        return "avx2"
    return "none"


BY_SHORTS: Final = dot_instruction() == "avx2"
"""Whether bytes have to become 16-bit integers before they are multiplied."""


def kernel_part(spell: Callable[..., None]) -> Any:
    """Make a function for kernels out of one that spells it out: `spell(vectors, *arguments)`, all 64-bit integers."""

    def typing(_context: Any, *_arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            spell(Vectors(builder), *arguments)
            return context.get_dummy_value()

        return types.void(*(types.intp,) * len(_arguments)), generate

    # Numba reads how many arguments there are from the parameters' names.
    names = ", ".join(list(inspect.signature(spell).parameters)[1:])
    scope: dict[str, Any] = {"typing": typing}
    exec(f"def {spell.__name__}(context, {names}):\n    return typing(context, {names})", scope)
    return intrinsic(scope[spell.__name__])


class Vectors:
    """Writes instructions at the place where a builder stands. Offsets are in bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    # Integers and addresses.

    def int64(self, value: int) -> Any:
        """A constant."""
        return ir.Constant(_I64, value)

    def add(self, *numbers: Any) -> Any:
        """The sum of 64-bit integers; Python's are constants."""
        values = [self.int64(number) if isinstance(number, int) else number for number in numbers]
        return functools.reduce(self.builder.add, values)

    def sub(self, x: Any, y: Any) -> Any:
        """The difference of 64-bit integers."""
        return self.builder.sub(x, y)

    def smaller(self, x: Any, y: Any) -> Any:
        """The smaller of 64-bit integers."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    def mul(self, x: Any, y: Any) -> Any:
        """The product of 64-bit integers."""
        return self.builder.mul(*(self.int64(number) if isinstance(number, int) else number for number in (x, y)))

    @contextmanager
    def loop_if_any(self, count: Any, *carried: Any) -> Iterator[Loop]:
        """A `loop` whose count may be 0 or less; then `results` are `carried`."""
        before = self.builder.block
        inside, after = self.builder.append_basic_block("any"), self.builder.append_basic_block("none")
        self.builder.cbranch(self.builder.icmp_signed(">", count, self.int64(0)), inside, after)
        self.builder.position_at_end(inside)
        loop = Loop(self.builder, count, list(carried))
        yield loop
        loop.close()
        end = self.builder.block
        self.builder.branch(after)
        self.builder.position_at_end(after)
        merged = []
        for start, result in zip(carried, loop.results, strict=True):
            phi = self.builder.phi(start.type)
            phi.add_incoming(start, before)
            phi.add_incoming(result, end)
            merged.append(phi)
        loop.carry(*merged)

    @contextmanager
    def loop(self, count: Any, *carried: Any) -> Iterator[Loop]:
        """Repeat what is written inside `count` times (at least once); `carried` values go from round to round."""
        loop = Loop(self.builder, count, list(carried))
        yield loop
        loop.close()

    def choose(self, number: Any, cases: Sequence[int], spell: Callable[[int], None]) -> None:
        """Run what `spell(case)` writes for the case that a 64-bit integer is; nothing for any other number."""
        after = self.builder.append_basic_block("chosen")
        switch = self.builder.switch(number, after)
        for case in cases:
            block = self.builder.append_basic_block(f"case {case}")
            switch.add_case(_I64(case), block)
            self.builder.position_at_end(block)
            spell(case)
            self.builder.branch(after)
        self.builder.position_at_end(after)

    # Memory.

    def load_floats(self, address: Any, offset: int = 0) -> Any:
        """16 float32."""
        return self._load(address, offset, _FLOATS)

    def load_ints(self, address: Any, offset: int = 0) -> Any:
        """16 int32."""
        return self._load(address, offset, _INTS)

    def load_halves(self, address: Any, offset: int = 0) -> Any:
        """16 float16 as float32."""
        return self.builder.fpext(self._load(address, offset, ir.VectorType(_F16, LANES)), _FLOATS)

    def load_bytes(self, address: Any, offset: int = 0) -> Any:
        """64 bytes."""
        return self._load(address, offset, _BYTES)

    def load_int8s(self, address: Any, offset: int = 0) -> Any:
        """16 signed bytes as float32."""
        few = self._load(address, offset, ir.VectorType(_I8, LANES))
        return self.builder.sitofp(self.builder.sext(few, _INTS), _FLOATS)

    def load_float(self, address: Any, offset: int = 0) -> Any:
        """One float32 in every lane."""
        return self.broadcast(self.load_one(address, offset))

    def load_one(self, address: Any, offset: int = 0) -> Any:
        """A single float32."""
        return self._load(address, offset, _F32, 4)

    def load_int(self, address: Any, offset: int = 0) -> Any:
        """A single int32."""
        return self._load(address, offset, _I32, 4)

    def load_int64(self, address: Any, offset: int = 0) -> Any:
        """A single 64-bit integer."""
        return self._load(address, offset, _I64, 8)

    def load_four_bytes(self, address: Any, offset: int = 0) -> Any:
        """Four bytes, repeated 16 times."""
        return self.builder.bitcast(self.broadcast(self._load(address, offset, _I32)), _BYTES)

    def prefetch(self, address: Any, num_bytes: int, offset: int = 0) -> None:
        """Have so many bytes brought near; they will be read soon."""
        pointer = _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        for line in range(0, num_bytes, 64):
            hints = [_I32(0), _I32(3), _I32(1)]  # to read, as near as can be, data
            self.builder.call(function, [self._pointer(address, offset + line, _I8), *hints])

    def store(self, vector: Any, address: Any, offset: int = 0) -> None:
        """Write a vector, or a single number."""
        self.builder.store(vector, self._pointer(address, offset, vector.type), align=1)

    def store_int8s(self, ints: Any, address: Any, offset: int = 0) -> None:
        """The lowest byte of each lane."""
        self.store(self.builder.trunc(ints, ir.VectorType(_I8, LANES)), address, offset)

    def store_shorts(self, ints: Any, address: Any, offset: int = 0) -> None:
        """The lower halves of 16 ints; of each four the even ones first, in the order of `shorts_of_signed`."""
        shorts = self.builder.trunc(ints, ir.VectorType(_I16, LANES))
        order = [4 * (lane // 4) + (0, 2, 1, 3)[lane % 4] for lane in range(LANES)]
        self.store(self.builder.shuffle_vector(shorts, shorts, ir.Constant(_INTS, order)), address, offset)

    # Arithmetic on vectors.

    def zeros(self) -> Any:
        """16 float32."""
        return ir.Constant(_FLOATS, [0.0] * LANES)

    def int_constant(self, number: int) -> Any:
        """An int32 in every lane."""
        return ir.Constant(_INTS, [number] * LANES)

    def int32(self, value: int) -> Any:
        """A single constant."""
        return ir.Constant(_I32, value)

    def int_zeros(self) -> Any:
        """16 int32."""
        return ir.Constant(_INTS, [0] * LANES)

    def constant(self, number: float) -> Any:
        """A float32 in every lane."""
        return ir.Constant(_FLOATS, [number] * LANES)

    def broadcast(self, number: Any) -> Any:
        """A scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, number, _I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """`x · y + z`, rounded once."""
        return self._call(f"llvm.fma.v{LANES}f32", _FLOATS, x, y, z)

    def product(self, x: Any, y: Any) -> Any:
        """Of floats."""
        return self.builder.fmul(x, y)

    def sum(self, x: Any, y: Any) -> Any:
        """Of floats."""
        return self.builder.fadd(x, y)

    def int_sum(self, x: Any, y: Any) -> Any:
        """Of ints."""
        return self.builder.add(x, y)

    def absolute(self, x: Any) -> Any:
        """Without the sign."""
        return self._call(f"llvm.fabs.v{LANES}f32", _FLOATS, x)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger of two floats; where one is not a number, the other."""
        return self._call(f"llvm.maxnum.v{LANES}f32", _FLOATS, x, y)

    def rounded(self, x: Any) -> Any:
        """The nearest integers as int32, halves to even. What is no number becomes something."""
        return self.builder.fptosi(self._call(f"llvm.rint.v{LANES}f32", _FLOATS, x), _INTS)

    def square_root(self, x: Any) -> Any:
        """Of floats, correctly rounded."""
        return self._call(f"llvm.sqrt.v{LANES}f32", _FLOATS, x)

    def as_ints(self, floats: Any) -> Any:
        """The bits of 16 floats as int32."""
        return self.builder.bitcast(floats, _INTS)

    def to_floats(self, ints: Any) -> Any:
        """int32 as float32."""
        return self.builder.sitofp(ints, _FLOATS)

    def are_numbers(self, x: Any, y: Any) -> Any:
        """Whether all lanes of both are numbers, infinite ones included."""
        lanes = self.builder.fcmp_unordered("uno", x, y)
        bits = self.builder.bitcast(lanes, ir.IntType(LANES))
        return self.builder.icmp_unsigned("==", bits, ir.IntType(LANES)(0))

    def low_nibbles(self, packed: Any) -> Any:
        """The lower four bits of each of 64 bytes."""
        return self.builder.and_(packed, ir.Constant(_BYTES, [15] * (4 * LANES)))

    def high_nibbles(self, packed: Any) -> Any:
        """The upper four bits of each of 64 bytes."""
        shift = ir.Constant(_INTS, [4] * LANES)
        shifted = self.builder.bitcast(self.builder.lshr(self.builder.bitcast(packed, _INTS), shift), _BYTES)
        return self.low_nibbles(shifted)

    def dot(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        """`sums` plus, in each lane, the products of its four unsigned and four signed bytes: exact int32."""
        match dot_instruction():
            case "avx512-vnni":
                operands = [self.builder.bitcast(operand, _INTS) for operand in (unsigned, signed)]
                return self._call("llvm.x86.avx512.vpdpbusd.512", _INTS, sums, *operands)
            case "avx-vnni":
                return self._dot_in_halves(sums, unsigned, signed)
            case "avx2":
                pairs = zip(self.shorts_of_unsigned(unsigned), self.shorts_of_signed(signed), strict=True)
                return functools.reduce(lambda total, pair: self.dot_shorts(total, *pair), pairs, sums)
            case "none":
                return self._dot_by_parts(sums, unsigned, signed)

    def shorts_of_unsigned(self, x: Any) -> tuple[Any, Any]:
        """The 32 even and the 32 odd bytes of 64 as 16-bit integers."""
        shorts = self.builder.bitcast(x, _SHORTS)
        return self.builder.and_(shorts, _SHORTS([255] * (2 * LANES))), self.builder.lshr(shorts, _EIGHT)

    def shorts_of_signed(self, x: Any) -> tuple[Any, Any]:
        """As `shorts_of_unsigned`."""
        shorts = self.builder.bitcast(x, _SHORTS)
        return self.builder.ashr(self.builder.shl(shorts, _EIGHT), _EIGHT), self.builder.ashr(shorts, _EIGHT)

    def less(self, shorts: Any, number: int) -> Any:
        """16-bit integers less a number."""
        return self.builder.sub(shorts, _SHORTS([number] * (2 * LANES)))

    def in_turn(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Two vectors of shorts as pairs in turn: a pair of x, a pair of y, and so on."""
        x, y = self.builder.bitcast(x, _INTS), self.builder.bitcast(y, _INTS)
        halves = ([lane // 2 + first + LANES * (lane % 2) for lane in range(LANES)] for first in (0, LANES // 2))
        first, second = (self.builder.shuffle_vector(x, y, ir.Constant(_INTS, order)) for order in halves)
        return first, second

    def load_two_shorts(self, address: Any, offset: int = 0) -> Any:
        """Two 16-bit integers, repeated 16 times."""
        return self.builder.bitcast(self.broadcast(self._load(address, offset, _I32)), _SHORTS)

    def dot_shorts(self, sums: Any, x: Any, y: Any) -> Any:
        """`sums` plus, in each lane, the products of its two 16-bit integers: exact int32. For AVX2."""
        half = ir.VectorType(_I32, LANES // 2)
        halves = []
        for first in (0, LANES):
            order = ir.Constant(ir.VectorType(_I32, LANES), list(range(first, first + LANES)))
            parts = [self.builder.shuffle_vector(operand, operand, order) for operand in (x, y)]
            halves.append(self._call("llvm.x86.avx2.pmadd.wd", half, *parts))
        products = self.builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))
        return self.builder.add(sums, products)

    def exponential(self, x: Any) -> Any:
        """`exp(x)` of floats that are 0 or less, to 2 units in the last place; below -87 that of -87; of NaN itself.

        x = n · ln 2 + r with |r| ≤ ln 2 / 2; a polynomial gives exp(r), and n goes into the exponent. Coefficients:
        Moshier's Cephes library, `expf`.
        """
        given = x
        x = self.larger(x, self.constant(-87.0))
        n = self._call(f"llvm.rint.v{LANES}f32", _FLOATS, self.product(x, self.constant(1.44269504088896341)))
        r = self.fma(n, self.constant(-0.693359375), x)
        r = self.fma(n, self.constant(2.12194440e-4), r)
        y = self.constant(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            y = self.fma(y, r, self.constant(coefficient))
        y = self.sum(self.fma(y, self.product(r, r), r), self.constant(1.0))
        exponent = self.builder.shl(self.builder.fptosi(n, _INTS), ir.Constant(_INTS, [23] * LANES))
        y = self.builder.bitcast(self.builder.add(self.builder.bitcast(y, _INTS), exponent), _FLOATS)
        return self.where(self.builder.fcmp_unordered("uno", given, given), given, y)

    def quotient(self, x: Any, y: Any) -> Any:
        """Of floats."""
        return self.builder.fdiv(x, y)

    def negative(self, x: Any) -> Any:
        """With the other sign."""
        return self.builder.fneg(x)

    def first_lanes(self, count: Any) -> Any:
        """Which of the 16 lanes are among the first `count`, a 64-bit integer of any sign."""
        lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
        return self.builder.icmp_signed("<", lanes, self.broadcast64(count))

    def broadcast64(self, number: Any) -> Any:
        """A 64-bit integer in every lane."""
        undefined = ir.Constant(ir.VectorType(_I64, LANES), ir.Undefined)
        first = self.builder.insert_element(undefined, number, _I32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def where(self, lanes: Any, x: Any, y: Any) -> Any:
        """x in those lanes, y in the others."""
        return self.builder.select(lanes, x, y)

    def as_fours(self, ints: Any) -> Any:
        """The lowest bytes of 16 ints, as four groups of four."""
        few = self.builder.trunc(ints, ir.VectorType(_I8, LANES))
        return self.builder.bitcast(few, ir.VectorType(_I32, LANES // 4))

    def byte(self, ints: Any, number: int) -> Any:
        """The lowest byte of one of 16 ints."""
        few = self.builder.trunc(ints, ir.VectorType(_I8, LANES))
        return self.builder.extract_element(few, self.int32(number))

    def four(self, fours: Any, number: int) -> Any:
        """One of the groups that `as_fours` gave."""
        return self.builder.extract_element(fours, self.int32(number))

    def sums_and_differences(self, x: Any, distance: int) -> Any:
        """Of floats in lanes that lie `distance` apart, 1, 2, 4 or 8: sums in the first of the two, and differences."""
        partners = ir.Constant(_INTS, [lane ^ distance for lane in range(LANES)])
        signs = ir.Constant(_FLOATS, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
        return self.sum(self.builder.shuffle_vector(x, x, partners), self.product(x, signs))

    def difference(self, x: Any, y: Any) -> Any:
        """Of floats."""
        return self.builder.fsub(x, y)

    # Reductions of a vector to a scalar, in an order that is fixed.

    def largest_lane(self, x: Any) -> Any:
        """The largest of 16 floats."""
        return self._fold(x, self.larger)

    def lane_sum(self, x: Any) -> Any:
        """The sum of 16 floats: lanes 8 apart, then 4, 2, 1."""
        return self._fold(x, self.sum)

    def int_lane_sum(self, x: Any) -> Any:
        """The sum of 16 ints."""
        return self._fold(x, self.int_sum)

    def first_lane(self, x: Any) -> Any:
        """The number in lane 0."""
        return self.builder.extract_element(x, _I32(0))

    def _fold(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        for distance in (8, 4, 2, 1):
            order = [(lane + distance) % LANES for lane in range(LANES)]
            x = combine(x, self.builder.shuffle_vector(x, x, ir.Constant(_INTS, order)))
        return self.first_lane(x)

    def _dot_in_halves(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        half = ir.VectorType(_I32, LANES // 2)
        halves = []
        for first in (0, LANES // 2):
            order = ir.Constant(half, list(range(first, first + LANES // 2)))
            parts = [
                self.builder.shuffle_vector(x, x, order)
                for x in (sums, self.builder.bitcast(unsigned, _INTS), self.builder.bitcast(signed, _INTS))
            ]
            halves.append(self._call("llvm.x86.avx512.vpdpbusd.256", half, *parts))
        return self.builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    def _dot_by_parts(self, sums: Any, unsigned: Any, signed: Any) -> Any:
        for byte in range(4):
            order = ir.Constant(_INTS, list(range(byte, 4 * LANES, 4)))
            x = self.builder.zext(self.builder.shuffle_vector(unsigned, unsigned, order), _INTS)
            y = self.builder.sext(self.builder.shuffle_vector(signed, signed, order), _INTS)
            sums = self.builder.add(sums, self.builder.mul(x, y))
        return sums

    def _pointer(self, address: Any, offset: int, kind: Any) -> Any:
        return self.builder.inttoptr(self.add(address, offset) if offset else address, kind.as_pointer())

    def _load(self, address: Any, offset: int, kind: Any, align: int = 1) -> Any:
        return self.builder.load(self._pointer(address, offset, kind), align=align)

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)
