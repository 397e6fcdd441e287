"""A few threads that carry out one kernel together, from its first phase to its last, without returning to Python.

A step of a small model is hundreds of short phases. Starting a parallel loop for each costs more than many of them
take, and a loop whose shares are fixed waits for the slower thread whenever another process takes a core. So the
threads of a team run the whole step: in each phase they claim pieces of work from a counter until none is left, and
meet at a barrier before the next. Who waits at a barrier spins for a moment, then offers its core to others. Between
steps the helpers sleep in the operating system, and take no time from the services beside them.

Owns threads, barriers and claims. Does not own what is computed.

Layout of a team's memory: int64 words, each that threads contend for on a cache line of its own.
"""

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from services.executor.kernels.jit import nested, single

Words = npt.NDArray[np.int64]

_LINE: Final = 8
"""Words on a cache line."""
_NUM_THREADS: Final = 0
_ARRIVED: Final = 1 * _LINE
_PASSED: Final = 2 * _LINE
_STEP: Final = 3 * _LINE
"""The number of the step that runs; below 0: leave."""
_MUTEX: Final = 4 * _LINE
_CONDITION: Final = 6 * _LINE
_COUNTERS: Final = 8 * _LINE
_CORES: Final = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
"""Those that this process may use; empty where nobody can say."""
_IS_X86: Final = platform.machine() in ("x86_64", "AMD64", "i686")


@nested
def num_threads(team: Words) -> Any:
    """How many threads share the work."""
    return team[_NUM_THREADS]


@nested
def claim(team: Words, phase: int) -> Any:
    """The next piece of a phase, counted from 0; the caller knows how many there are."""
    return _fetch_add(team, _COUNTERS + _LINE * phase, 1)


@nested
def run_length(team: Words, num_pieces: int) -> Any:
    """How many neighbouring pieces to claim at once, so that each thread claims about eight times in a phase.

    Memory is read faster in long runs; and whoever lost its core for a while has little left that others wait for.
    """
    return max(1, num_pieces // (8 * team[_NUM_THREADS]))


@nested
def barrier(team: Words) -> None:
    """Return when every thread of the team is here; what each wrote before is seen by all.

    Spins for about a microsecond before it yields: two threads on one core would else wait for each other's spinning in
    each of some hundred phases (a step that took 23 ms so took 5 ms once each had a core).
    """
    num_threads = team[_NUM_THREADS]
    if num_threads == 1:
        return
    passed = _read(team, _PASSED)
    if _fetch_add(team, _ARRIVED, 1) == num_threads - 1:
        team[_ARRIVED] = 0
        _fetch_add(team, _PASSED, 1)
        return
    spins = 0
    while _read(team, _PASSED) == passed:
        if spins < 50:
            spins += 1
            _pause()
        else:
            _sched_yield()


@nested
def first_step(team: Words, thread: int) -> Any:
    """The number of the step that begins: the leader, thread 0, wakes the helpers for it, and they sleep until then.

    Less than 0 tells to leave.
    """
    if thread > 0:
        return next_step(team, thread, 0)
    team[_COUNTERS:] = 0
    address = team.ctypes.data
    _mutex_lock(address + 8 * _MUTEX)
    team[_STEP] += 1
    _condition_broadcast(address + 8 * _CONDITION)
    _mutex_unlock(address + 8 * _MUTEX)
    return team[_STEP]


@nested
def next_step(team: Words, thread: int, seen: int) -> Any:
    """The step after number `seen`, once it begins; less than 0 for the leader, who returns after each, or to leave."""
    if thread == 0:
        return -1
    address = team.ctypes.data
    _mutex_lock(address + 8 * _MUTEX)
    while _read(team, _STEP) == seen:
        _condition_wait(address + 8 * _CONDITION, address + 8 * _MUTEX)
    step = _read(team, _STEP)
    _mutex_unlock(address + 8 * _MUTEX)
    return step


class Team:
    """Threads for one kernel, a compiled function that releases Python's lock: `kernel(team, thread, *arguments)`.

        step = first_step(team, thread)
        while step >= 0:
            … phases, a barrier after each …
            step = next_step(team, thread, step)

    So the leader takes part in one step, and a helper in every step until it is told to leave. The arguments are arrays
    that stay the same over all steps; what differs from step to step is written into them.
    """

    def __init__(
        self, kernel: Callable[..., None], arguments: tuple[Any, ...], *, num_threads: int, num_phases: int
    ) -> None:
        """`num_phases` is the largest number of phases that a step has."""
        self._memory = np.zeros(_COUNTERS + _LINE * num_phases, np.int64)
        self._memory[_NUM_THREADS] = num_threads
        self._kernel = kernel
        self._arguments = arguments
        self._threads: list[threading.Thread] = []
        self.seconds = 0.0
        """What the last step took."""
        self._nice = 0
        _initialize(self._memory)

    @property
    def num_threads(self) -> int:
        """How many compute, the leader included."""
        return int(self._memory[_NUM_THREADS])

    def run(self) -> None:
        """Carry out one step. Helpers start with the first one and are as nice as whoever calls it."""
        if not self._threads and self.num_threads > 1:
            self._start()
        started = time.perf_counter()
        self._kernel(self._memory, 0, *self._arguments)
        self.seconds = time.perf_counter() - started

    def close(self) -> None:
        """End the helpers; nothing if there are none."""
        if self._threads:
            _dismiss(self._memory)
            for thread in self._threads:
                thread.join()
            self._threads = []
            self._memory[_STEP] = 0

    def __del__(self) -> None:
        if self._threads and not sys.is_finalizing():
            _dismiss(self._memory)

    def _start(self) -> None:
        """Start the helpers. If there is a thread for each core, each helper keeps to one of its own: where it would
        wake is else anybody's guess, and two threads on one core are slower than one. The leader takes what is left."""
        nice = os.nice(0)
        owns_cores = len(_CORES) == self.num_threads
        for number in range(1, self.num_threads):
            # Nothing in a helper refers to the team, so that a team nobody uses ends its helpers.
            core = _CORES[number] if owns_cores else None
            arguments = (self._kernel, self._memory, number, self._arguments, nice, core)
            thread = threading.Thread(target=_help, args=arguments, name=f"compute-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)


def _help(
    kernel: Callable[..., None], memory: Words, number: int, arguments: tuple[Any, ...], nice: int, core: int | None
) -> None:
    """What a helper does: on Linux, priorities and cores are each thread's own."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    if (more := nice - os.nice(0)) > 0:
        os.nice(more)
    kernel(memory, number, *arguments)


_mutex_init: Any = types.ExternalFunction("pthread_mutex_init", types.int32(types.intp, types.intp))
_mutex_lock: Any = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
_mutex_unlock: Any = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
_condition_init: Any = types.ExternalFunction("pthread_cond_init", types.int32(types.intp, types.intp))
_condition_wait: Any = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
_condition_broadcast: Any = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())


@single
def _initialize(team: Words) -> None:
    address = team.ctypes.data
    _mutex_init(address + 8 * _MUTEX, 0)
    _condition_init(address + 8 * _CONDITION, 0)


@single
def _dismiss(team: Words) -> None:
    address = team.ctypes.data
    _mutex_lock(address + 8 * _MUTEX)
    team[_STEP] = -1
    _condition_broadcast(address + 8 * _CONDITION)
    _mutex_unlock(address + 8 * _MUTEX)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _fetch_add(_typing_context: Any, _team: Any, _word: Any, _more: Any) -> Any:
    """Add to a word of the team's memory at once; what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _word_pointer(context, builder, signature, arguments)
        return builder.atomic_rmw("add", pointer, arguments[2], "seq_cst")

    return types.int64(_team, types.intp, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _read(_typing_context: Any, _team: Any, _word: Any) -> Any:
    """A word of the team's memory as it is now."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word_pointer(context, builder, signature, arguments), "seq_cst", 8)

    return types.int64(_team, types.intp), generate


@intrinsic  # type: ignore[untyped-decorator]
def _pause(_typing_context: Any) -> Any:
    """Tell the processor that this thread spins, where it has an instruction for it."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), generate


def _word_pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])
