"""What is guessed from a sequence against the naive formula, and that nothing else is touched."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.executor.kernels.draft import guess, guess_naive

ROOM = 60
few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def guessed(tokens: list[int], most: int) -> list[int]:
    table = np.full((3, ROOM), 9, np.int32)
    table[1, : len(tokens)] = tokens
    (count,) = guess(
        table, np.array([0, len(tokens), 0], np.int32), np.array([1], np.int32), np.array([most], np.int32)
    )
    assert (table[[0, 2]] == 9).all()
    assert (table[1, len(tokens) + count :] == 9).all()
    assert table[1, : len(tokens)].tolist() == tokens
    return [int(token) for token in table[1, len(tokens) : len(tokens) + count]]


@given(tokens=few_tokens, most=st.integers(0, 12))
def test_a_guess_is_what_the_formula_says(tokens: list[int], most: int) -> None:
    assert guessed(tokens, most) == guess_naive(tokens, most)


def test_a_guess_follows_the_longest_and_then_the_latest_match() -> None:
    assert guessed([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 2) == [7, 2]
    assert guessed([2, 3, 7, 2, 3, 8, 1, 2, 3], 2) == [8, 1]


def test_what_repeats_goes_on_repeating() -> None:
    assert guessed([5, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert guessed([4, 4, 4], 3) == [4, 4, 4]


def test_one_token_that_occurred_before_is_no_reason_to_guess() -> None:
    assert guessed([1, 2, 3, 1], 4) == []
    assert guessed([1], 4) == []
