"""The random number of a draw: a function of seed, choice and position, the same for ever."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sampling import SamplingParams, uniform

SEEDS = st.integers(0, 2**63 - 1)
INDICES = st.integers(0, 2**20)


def _splitmix64(state: int) -> int:
    """The first output of SplitMix64 from `state`, after the published C code (Vigna, 2015)."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_the_reference_here_is_splitmix64() -> None:
    """Its first output from state 0, and from 1234567 (the value that Rosetta Code lists)."""
    assert _splitmix64(0) == 0xE220A8397B1DCDAF
    assert _splitmix64(1234567) == 6457827717110365317


@pytest.mark.parametrize(
    ("seed", "choice", "position", "number"),
    [
        (0, 0, 0, 0.13870941014555427),
        (1, 0, 0, 0.6935121390102292),
        (0, 1, 0, 0.2691303195904541),
        (0, 0, 1, 0.18436667429957676),
        (2**63 - 1, 7, 100_000, 0.3459029715230725),
    ],
)
def test_known_answers(seed: int, choice: int, position: int, number: float) -> None:
    """A change here changes the output of every seeded request."""
    assert uniform(seed, choice, position) == number


@given(SEEDS, INDICES, INDICES)
def test_it_is_three_rounds_of_splitmix64(seed: int, choice: int, position: int) -> None:
    rounds = _splitmix64(_splitmix64(_splitmix64(seed) ^ choice) ^ position)
    assert uniform(seed, choice, position) == (rounds >> 11) / 2**53


@given(SEEDS, INDICES, INDICES)
def test_it_lies_between_zero_and_one_and_repeats(seed: int, choice: int, position: int) -> None:
    number = uniform(seed, choice, position)
    assert 0.0 <= number < 1.0
    assert uniform(seed, choice, position) == number


def _chi_squared(numbers: list[float], num_bins: int) -> float:
    counts = [0] * num_bins
    for number in numbers:
        counts[int(number * num_bins)] += 1
    expected = len(numbers) / num_bins
    return sum((count - expected) ** 2 / expected for count in counts)


@pytest.mark.parametrize(
    "numbers",
    [
        [uniform(7, 0, position) for position in range(20_000)],
        [uniform(7, choice, 0) for choice in range(20_000)],
        [uniform(seed, 0, 0) for seed in range(20_000)],
    ],
    ids=["along positions", "along choices", "along seeds"],
)
def test_every_direction_is_uniform(numbers: list[float]) -> None:
    # 63 degrees of freedom: mean 63, standard deviation 11; the bound is 5 deviations up. The draw is fixed.
    assert _chi_squared(numbers, 64) < 63 + 5 * 11.2


def _correlation(pairs: list[tuple[float, float]]) -> float:
    xs, ys = [x - 0.5 for x, _ in pairs], [y - 0.5 for _, y in pairs]
    return sum(x * y for x, y in zip(xs, ys, strict=True)) / len(pairs) * 12


@pytest.mark.parametrize(
    "pairs",
    [
        [(uniform(3, 0, p), uniform(3, 1, p)) for p in range(10_000)],
        [(uniform(3, 0, p), uniform(3, 0, p + 1)) for p in range(10_000)],
        [(uniform(s, 0, 5), uniform(s + 1, 0, 5)) for s in range(10_000)],
        [(uniform(3, i, i + 1), uniform(3, i + 1, i)) for i in range(10_000)],
    ],
    ids=["next choice", "next position", "next seed", "choice and position swapped"],
)
def test_neighbours_are_independent(pairs: list[tuple[float, float]]) -> None:
    # The correlation of 10,000 independent pairs has a standard deviation of 0.01.
    assert abs(_correlation(pairs)) < 0.05


def test_no_two_draws_of_a_request_share_their_number() -> None:
    draws = [uniform(11, choice, position) for choice, position in itertools.product(range(16), range(1000))]
    assert len(set(draws)) == len(draws)


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(seed=1, temperature=0.0).is_greedy
    assert not SamplingParams(seed=1, temperature=1e-6).is_greedy
