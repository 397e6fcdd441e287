"""Guessing the next tokens of a sequence from what it already says: where did its last tokens occur before?

Layout: token_ids [slots, room] int32, the first `num_tokens[slot]` of a row known; what is guessed is written behind
them. Nothing is kept between calls: a guess depends on the sequence alone.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from services.executor.kernels.jit import Ints, single

MIN_MATCH: Final = 2
"""Tokens that must have occurred before in the same order; after one alone, little follows again."""
MAX_MATCH: Final = 8
"""An occurrence that agrees in so many is as good as any."""


def guess(token_ids: Ints, num_tokens: Ints, slots: Ints, most: Ints) -> npt.NDArray[np.int32]:
    """How many tokens were guessed for each of `slots` [S], at most `most` [S]; they are in `token_ids`."""
    counts = np.zeros(len(slots), np.int32)
    _guess(token_ids, num_tokens, slots, most, counts)
    return counts


def guess_naive(tokens: list[int], most: int) -> list[int]:
    """What follows the occurrence of the longest end of `tokens`, the latest among equals.

    A guess that reaches the end of what is known goes on with itself: what repeats goes on repeating.
    """
    for length in range(min(MAX_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                said = list(tokens)
                for number in range(most):
                    said.append(said[start + length + number])
                return said[len(tokens) :]
    return []


@single
def _guess(token_ids: Ints, num_tokens: Ints, slots: Ints, most: Ints, counts: Ints) -> None:
    for number in range(len(slots)):
        if most[number] == 0:
            continue
        tokens, known = token_ids[slots[number]], num_tokens[slots[number]]
        best_length, best = MIN_MATCH - 1, -1
        for last in range(known - 2, -1, -1):
            length = 0
            while length <= last and length < MAX_MATCH and tokens[last - length] == tokens[known - 1 - length]:
                length += 1
            if length > best_length:
                best_length, best = length, last
                if length == MAX_MATCH:
                    break
        if best >= 0:
            counts[number] = most[number]
            for ahead in range(most[number]):
                tokens[known + ahead] = tokens[best + 1 + ahead]
