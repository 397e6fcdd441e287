"""How fast this machine reads memory: the least time that a step for few tokens can take, since it reads all weights.

Owns a block of memory as large as the weights, and threads that read it in the way those of a model read theirs.
"""

import time
from statistics import median
from typing import Final

import numpy as np

from services.executor.kernels.jit import Longs, nested, single
from services.executor.kernels.team import Team, Words, barrier, claim, first_step, next_step, run_length
from services.executor.memory import untouched

PIECE: Final = 2048
"""Numbers that are claimed together: 16 KiB, about what a panel of weights has."""
_NUM_READS: Final = 7
_LINE: Final = 8


class MemoryReader:
    """Reads the same memory again and again, on all threads."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        """Whole pieces are read, one at least."""
        num_pieces = max(1, num_bytes // (8 * PIECE))
        self.num_bytes: Final = num_pieces * 8 * PIECE
        numbers = np.frombuffer(untouched(self.num_bytes), np.int64)
        numbers[:] = 1
        self._sums = np.zeros((num_threads, _LINE), np.int64)
        self._team = Team(_read, (numbers, self._sums), num_threads=num_threads, num_phases=1)

    def seconds_per_byte(self) -> float:
        """The median of several readings."""
        self._read()  # wakes the threads
        return median(self._read() for _ in range(_NUM_READS)) / self.num_bytes

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def _read(self) -> float:
        """How long it took. The sums prove that every number was read, once."""
        self._sums[:] = 0
        started = time.perf_counter()
        self._team.run()
        seconds = time.perf_counter() - started
        assert int(self._sums.sum()) == self.num_bytes // 8
        return seconds


@nested
def _read_share(team: Words, thread: int, numbers: Longs, sums: Longs) -> None:
    num_pieces = len(numbers) // PIECE
    run = run_length(team, num_pieces)
    first = claim(team, 0) * run
    while first < num_pieces:
        share = numbers[first * PIECE : min(first + run, num_pieces) * PIECE]
        total = 0
        for place in range(len(share)):  # so that the compiler sees that it can use vectors: three times as fast
            total += share[place]
        sums[thread, 0] += total
        first = claim(team, 0) * run
    barrier(team)


@single
def _read(team: Words, thread: int, numbers: Longs, sums: Longs) -> None:
    step = first_step(team, thread)
    while step >= 0:
        _read_share(team, thread, numbers, sums)
        step = next_step(team, thread, step)
