"""Intel's tile registers (AMX): 16 tokens · 16 rows of a weight · 64 columns of bytes in one instruction, exact int32.

Owns how a kernel spells them, and whether this process may use them at all. Owns no layout.

Eight registers of 16 rows of 64 bytes. A multiplication takes 16 cycles, and its sums may be used after about 50, so
several sums should be under way at once. A thread says what shape its registers have before it uses them (`begin`), and
that it is done with them (`end`): they are a kilobyte each, which the system else saves whenever it lets another thread
run. Source: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.
"""

import ctypes
import functools
import platform
import sys
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils

from services.executor.kernels.vectors import Vectors, kernel_part

TOKENS: Final = 16
"""Rows of a register of activations, and of sums."""
COLUMNS: Final = 64
"""Bytes that one instruction adds up for each sum."""
SUMS: Final = (0, 1, 2, 3)
ACTIVATIONS: Final = (4, 5)
WEIGHTS: Final = (6, 7)
"""Numbers of registers."""

_ARCH_PRCTL: Final = 158
_REQUEST_PERMISSION: Final = 0x1023
_TILE_DATA: Final = 18
_I8: Final = ir.IntType(8)
_I64: Final = ir.IntType(64)
_HAS_INSTRUCTIONS: Final = all(llvm.get_host_cpu_features().get(name) for name in ("amx-tile", "amx-int8"))


@functools.cache
def can_use_tiles() -> bool:
    """Whether the processor has them and the system lets this process use them; asks for that, for all its threads."""
    if not _HAS_INSTRUCTIONS or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _shapes() -> npt.NDArray[np.uint8]:
    """What `begin` reads: palette 1, and for each register the bytes of a row and the number of rows."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    shapes[16:32].view(np.uint16)[:] = COLUMNS
    shapes[48:56] = TOKENS
    return shapes


SHAPES: Final = _shapes()
"""To be given to `begin` by its address."""


@kernel_part
def begin(v: Vectors, shapes: Any) -> None:
    """For kernels: `begin(address of SHAPES)`, before a thread uses tiles."""
    _call(v, "ldtilecfg", v.builder.inttoptr(shapes, _I8.as_pointer()))


@kernel_part
def end(v: Vectors, _shapes: Any) -> None:
    """For kernels: `end(0)`, when a thread has used them."""
    _call(v, "tilerelease")


def load(v: Vectors, register: int, address: Any, stride: Any) -> None:
    """16 rows of 64 bytes, `stride` bytes apart: 0 repeats the first."""
    _call(v, "tileloadd64", _I8(register), v.builder.inttoptr(address, _I8.as_pointer()), stride)


def multiply(v: Vectors, sums: int, activations: int, weights: int) -> None:
    """Add to int32 sums [tokens, rows] the products of unsigned bytes [tokens, columns] and signed [rows, columns],
    the latter by fours of columns: [columns / 4, rows, 4]."""
    _call(v, "tdpbusd", _I8(sums), _I8(activations), _I8(weights))


def multiply_signed(v: Vectors, sums: int, activations: int, weights: int) -> None:
    """As `multiply`, of signed activations and unsigned weights."""
    _call(v, "tdpbsud", _I8(sums), _I8(activations), _I8(weights))


def clear(v: Vectors, register: int) -> None:
    """Make all of a register 0."""
    _call(v, "tilezero", _I8(register))


def store(v: Vectors, register: int, address: Any, stride: Any) -> None:
    """Write the 16 rows of a register, `stride` bytes apart."""
    _call(v, "tilestored64", _I8(register), v.builder.inttoptr(address, _I8.as_pointer()), stride)


def _call(v: Vectors, name: str, *arguments: Any) -> None:
    """Nothing where the processor has no tiles: such code is never run, but it is compiled."""
    if _HAS_INSTRUCTIONS:
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        v.builder.call(cgutils.get_or_insert_function(v.builder.module, kind, f"llvm.x86.{name}"), arguments)
