"""A fixed rotation of a model's hidden states, after which no number of a token is much larger than the rest.

Trained models keep a few hidden numbers that are a hundred times as large as others, and one step for all numbers of a
token would leave the others a few levels. Any rotation Q of the hidden states cancels out if it is folded into the
weights that write them (Qᵀ · W) and that read them (W · Q), and root mean squares stay what they are. This one mixes
all numbers evenly, whatever the model; so nothing has to be learned from sample texts.

Every number is computed by single additions and multiplications in an order that is fixed: all machines get the same
bits. Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024.
"""

from concurrent.futures import ThreadPoolExecutor
from hashlib import shake_128
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_AT_ONCE: Final = 512
"""Columns that stay in a core's own cache meanwhile."""


class Rotation:
    """For vectors of one size: signs, a Hadamard transform of the largest power of 2 in it, a Hartley transform of the
    rest."""

    def __init__(self, size: int, num_threads: int = 1) -> None:
        self.size: Final = size
        self._power = size & -size
        self._rest = size // self._power
        self._num_threads = num_threads
        bits = np.frombuffer(shake_128(b"signs of a rotation").digest(-(-size // 8)), np.uint8)
        self._signs = np.where(np.unpackbits(bits)[:size, np.newaxis], np.float32(1), np.float32(-1))
        angles = np.outer(np.arange(self._rest), np.arange(self._rest)) % self._rest * (2 * np.pi / self._rest)
        # The Hadamard transform below is not scaled.
        self._mix = ((np.cos(angles) + np.sin(angles)) / np.sqrt(size)).astype(np.float32)

    def __call__(self, columns: Floats) -> Floats:
        """Columns [size, n] of hidden numbers, each rotated, in place."""
        parts = [columns[:, first : first + _AT_ONCE] for first in range(0, columns.shape[1], _AT_ONCE)]
        with ThreadPoolExecutor(self._num_threads) as threads:
            list(threads.map(self._rotate, parts))
        return columns

    def rows(self, rows: Floats) -> Floats:
        """Rows [n, size], each rotated."""
        rotated: Floats = self(np.array(rows.T, order="C")).T
        return rotated

    @np.errstate(invalid="ignore", over="ignore")  # whoever asks finds what is no number in the result
    def _rotate(self, columns: Floats) -> None:
        part = columns * self._signs
        width = part.shape[1]
        distance = 1
        while distance < self._power:
            pairs = part.reshape(-1, 2, distance, width)
            part = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1)
            distance *= 2
        part = part.reshape(self._rest, self._power, width)
        mixed = np.empty_like(part)
        for target in range(self._rest):
            total = part[0] * self._mix[0, target]
            for source in range(1, self._rest):
                total += part[source] * self._mix[source, target]
            mixed[target] = total
        columns[...] = mixed.reshape(self.size, width)
