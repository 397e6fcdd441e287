"""The sampler against a second, slow implementation, against statistics, and at the edges that its docstring names."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.executor import sampler
from services.executor.kernels.draw import weigh
from services.executor.sampler import Draw, Drawing, draw
from services.executor.slots import Choice
from shared.ids import RequestId
from shared.sampling import SamplingParams
from tests.executor import sampling_oracle as oracle

GREEDY = SamplingParams(seed=0, temperature=0.0)


def choice_of(
    sampling: SamplingParams, prompt: Sequence[int] = (0,), output: Sequence[int] = (), index: int = 0
) -> Choice:
    return Choice(RequestId("req-1"), index, sampling, len(prompt), np.array([*prompt, *output], np.int32))


def sample(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Draw]:
    drawing = Drawing(logits)
    return [drawing.draw(row, choice) for row, choice in enumerate(choices)]


def draw_from(logits: Sequence[float], sampling: SamplingParams, **tokens: Sequence[int]) -> Draw:
    return draw(np.array(logits, np.float32), choice_of(sampling, **tokens))  # type: ignore[arg-type]


def token_of(logits: Sequence[float], sampling: SamplingParams, **tokens: Sequence[int]) -> int:
    outcome = draw_from(logits, sampling, **tokens)
    assert outcome.failure is None
    return outcome.token_id


def possible_tokens(logits: Sequence[float], sampling: SamplingParams) -> set[int]:
    """Every token that one of many seeds draws."""
    row = np.array(logits, np.float32)
    return {draw(row, choice_of(with_changes(sampling, seed=seed))).token_id for seed in range(200)}


def with_changes(sampling: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(sampling, **changes)


# Against the oracle.

VOCAB = 12
token_ids = st.integers(0, VOCAB - 1)
logit_values = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 2.5]),  # many ties
    st.floats(-30, 30, width=32),
)
params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-3, 3)),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 3)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.2, 3)),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=3),
    min_tokens=st.integers(0, 4),
    end_token_ids=st.lists(token_ids, max_size=3, unique=True).map(tuple),
    num_logprobs=st.one_of(st.none(), st.integers(0, VOCAB + 2)),
)


@given(
    logits=st.lists(logit_values, min_size=VOCAB, max_size=VOCAB),
    sampling=params,
    prompt=st.lists(token_ids, min_size=1, max_size=6),
    output=st.lists(token_ids, max_size=6),
    index=st.integers(0, 4),
)
def test_every_draw_is_the_slow_implementations(
    logits: list[float], sampling: SamplingParams, prompt: list[int], output: list[int], index: int
) -> None:
    outcome = draw(np.array(logits, np.float32), choice_of(sampling, prompt, output, index))
    shaped = oracle.shaped_logits(logits, prompt, output, sampling)
    if sampling.is_greedy:
        assert outcome.token_id == oracle.likeliest(shaped)
    else:
        expected, margin = oracle.drawn(oracle.kept_weights(shaped, sampling), sampling, index, len(output))
        assume(margin > 1e-5)  # the two may round exp() differently, so a coin on its edge may fall either way
        assert outcome.token_id == expected
    assert outcome.failure is None
    if sampling.num_logprobs is None:
        assert outcome.logprobs is None
    else:
        check_logprobs(outcome, logits, sampling.num_logprobs)


def check_logprobs(outcome: Draw, logits: list[float], num_alternatives: int) -> None:
    found, expected = outcome.logprobs, oracle.logprobs(logits)
    assert found is not None
    ranking = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    assert list(found.top_token_ids) == ranking[:num_alternatives]
    assert found.logprob == pytest.approx(expected[outcome.token_id], abs=1e-12)  # float64, other order of additions
    assert found.top_logprobs == pytest.approx([expected[token_id] for token_id in found.top_token_ids], abs=1e-12)


@given(
    rows=st.lists(st.tuples(st.lists(logit_values, min_size=VOCAB, max_size=VOCAB), params), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_rows_draw_does_not_depend_on_other_rows(
    rows: list[tuple[list[float], SamplingParams]], data: st.DataObject
) -> None:
    outputs = [data.draw(st.lists(token_ids, max_size=4)) for _ in rows]
    choices = [choice_of(sampling, output=output) for (_, sampling), output in zip(rows, outputs, strict=True)]
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    order = data.draw(st.permutations(range(len(rows))))
    together = sample(logits[order], [choices[row] for row in order])
    for place, row in enumerate(order):
        assert together[place] == sample(logits[row : row + 1], [choices[row]])[0]
        assert together[place] == draw(logits[row].numpy(), choices[row])


def test_the_draw_is_a_function_of_tokens_and_prompt_length_alone() -> None:
    sampling = SamplingParams(seed=5, temperature=1.0, frequency_penalty=0.7, repetition_penalty=1.2)
    row = np.random.default_rng(0).normal(size=50).astype(np.float32)
    fresh = draw(row, choice_of(sampling, prompt=[1, 2, 3], output=[4, 4]))
    for _ in range(3):
        draw(row, choice_of(sampling, prompt=[9], output=[8, 8, 8]))
    assert draw(row, choice_of(sampling, prompt=[1, 2, 3], output=[4, 4])) == fresh


# Statistics.


def frequencies(logits: Sequence[float], sampling: SamplingParams, num_draws: int) -> list[float]:
    row = np.array(logits, np.float32)
    output = np.zeros(num_draws + 1, np.int32)
    counts = Counter(
        draw(row, Choice(RequestId("req-1"), 0, sampling, 1, output[: 1 + position])).token_id
        for position in range(num_draws)
    )
    return [counts[token_id] / num_draws for token_id in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability(temperature: float) -> None:
    logits = [0.3, -1.2, 2.0, 0.0, 1.1, -3.0]
    num_draws = 20_000
    found = frequencies(logits, SamplingParams(seed=11, temperature=temperature), num_draws)
    total = sum(math.exp(logit / temperature) for logit in logits)
    for frequency, logit in zip(found, logits, strict=True):
        probability = math.exp(logit / temperature) / total
        # Five standard deviations: by chance alone once in a million seeds, and this seed is fixed.
        assert abs(frequency - probability) < 5 * math.sqrt(probability * (1 - probability) / num_draws)


def test_what_filters_leave_is_drawn_in_proportion() -> None:
    num_draws = 20_000
    found = frequencies([2.0, 1.0, 0.0, -1.0, -2.0], SamplingParams(seed=12, top_k=3, min_p=0.2), num_draws)
    total = math.e**2 + math.e  # min_p drops the third: e^-2 is less than 0.2
    assert found[2:] == [0, 0, 0]
    assert abs(found[0] - math.e**2 / total) < 5 * math.sqrt(0.25 / num_draws)


# Edges.


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = [1.0, 3.0, 3.0, 3.0, 2.0]
    assert token_of(logits, GREEDY) == 1
    assert sample(torch.tensor([logits, logits[::-1]]), [choice_of(GREEDY)] * 2) == [Draw(1), Draw(1)]


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    assert possible_tokens([0.0, 5.0, 5.0, 5.0, 5.0], SamplingParams(seed=0, top_k=3)) == {1, 2, 3}


def test_top_k_of_one_is_greedy() -> None:
    assert possible_tokens([1.0, 1.5, 1.5, 0.0], SamplingParams(seed=0, temperature=2.0, top_k=1)) == {1}


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert possible_tokens([0.0, 0.0, 0.0], SamplingParams(seed=0, top_k=1000)) == {0, 1, 2}


def test_top_p_keeps_the_shortest_prefix_that_reaches_it_even_among_equals() -> None:
    assert possible_tokens([0.0] * 4, SamplingParams(seed=0, top_p=0.5)) == {0, 1}
    assert possible_tokens([0.0] * 4, SamplingParams(seed=0, top_p=0.51)) == {0, 1, 2}


def test_top_p_of_zero_keeps_the_likeliest() -> None:
    assert possible_tokens([0.0, 1.0, 1.0], SamplingParams(seed=0, top_p=0.0)) == {1}


def test_top_p_counts_what_top_k_left() -> None:
    # Of two equal tokens the first reaches half; of the four there were, it would not.
    assert possible_tokens([0.0] * 4, SamplingParams(seed=0, top_k=2, top_p=0.5)) == {0}


def kept(logits: npt.NDArray[np.float32], sampling: SamplingParams) -> list[int]:
    weights, sums = weigh(logits, sampling.temperature)
    ids = sampler._kept(logits, weights, sums, sampling)
    assert ids is not None
    return [int(token_id) for token_id in ids]


@pytest.mark.parametrize("num_tokens", [300, 2000, 5000])
def test_top_p_of_a_flat_distribution_looks_as_far_as_it_must(num_tokens: int) -> None:
    assert num_tokens > sampler._FIRST_NUM_RANKED
    flat = np.zeros(num_tokens, np.float32)
    assert kept(flat, SamplingParams(seed=0, top_p=0.9)) == list(range(round(num_tokens * 0.9)))


def test_top_p_of_a_nearly_flat_distribution_keeps_a_prefix_of_the_ranking() -> None:
    num_tokens = 3000
    rising = np.linspace(-1e-3, 0, num_tokens, dtype=np.float32)  # the last is the likeliest, all by a hair
    found = kept(rising, SamplingParams(seed=0, top_p=0.5))
    assert found == list(range(found[0], num_tokens))
    assert len(found) == pytest.approx(num_tokens / 2, abs=2)


def test_tokens_far_below_the_likeliest_are_found_when_top_k_asks_for_them() -> None:
    logits = np.array([0.0, -500.0, -100.0, -3.0], np.float32)
    assert [kept(logits, SamplingParams(seed=0, top_k=k)) for k in (1, 2, 3)] == [[0], [0, 3], [0, 2, 3]]


@pytest.mark.parametrize(
    ("noise", "expected"), [(0.0, 1), (math.nextafter(0.5, 0), 1), (0.5, 3), (math.nextafter(1, 0), 3)]
)
def test_the_walk_takes_the_first_token_beyond_the_noise(
    noise: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens 0, 2 and 4 are so unlikely that their weight is nothing; whatever the noise, they are not drawn."""
    monkeypatch.setattr(sampler, "uniform", lambda *_: noise)
    assert token_of([-2000.0, 5.0, -2000.0, 5.0, -2000.0], SamplingParams(seed=0)) == expected


def test_min_p_is_relative_to_the_likeliest() -> None:
    logits = [0.0, math.log(0.5), math.log(0.4), math.log(0.1)]
    assert possible_tokens(logits, SamplingParams(seed=0, min_p=0.3)) == {0, 1, 2}
    assert possible_tokens(logits, SamplingParams(seed=0, min_p=1.0)) == {0}


def test_bias_comes_before_penalties() -> None:
    # (-1 + 6) / 4 is less than 1.5; the other way round, -1 · 4 + 6 would be more.
    sampling = SamplingParams(seed=0, temperature=0.0, repetition_penalty=4.0, logit_bias={1: 6.0})
    assert token_of([1.5, -1.0], sampling, prompt=[1]) == 0


def test_no_bias_brings_back_a_suppressed_end_token() -> None:
    sampling = SamplingParams(seed=0, temperature=0.0, min_tokens=1, end_token_ids=(1,), logit_bias={1: 100.0})
    assert token_of([0.0, 0.0], sampling) == 0
    assert token_of([0.0, 0.0], sampling, output=[0]) == 1


def test_end_tokens_come_with_the_output_token_after_min_tokens() -> None:
    sampling = SamplingParams(seed=0, temperature=0.0, min_tokens=3, end_token_ids=(1, 2))
    logits = [0.0, 5.0, 4.0]
    found = [token_of(logits, sampling, output=[0] * num_output) for num_output in range(5)]
    assert found == [0, 0, 0, 1, 1]


def test_end_tokens_outside_the_vocabulary_cannot_be_drawn_anyway() -> None:
    sampling = SamplingParams(seed=0, temperature=0.0, min_tokens=3, end_token_ids=(1, 99))
    assert token_of([0.0, 5.0], sampling) == 0


def test_the_prompt_counts_for_the_repetition_penalty_only() -> None:
    frequency = SamplingParams(seed=0, temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0)
    repetition = SamplingParams(seed=0, temperature=0.0, repetition_penalty=2.0)
    assert token_of([1.0, 1.5], frequency, prompt=[1, 1]) == 1
    assert token_of([1.0, 1.5], frequency, prompt=[0], output=[1]) == 0
    assert token_of([1.0, 1.5], repetition, prompt=[1]) == 0


def test_frequency_counts_and_presence_does_not() -> None:
    logits = [0.0, 1.0]
    frequency = SamplingParams(seed=0, temperature=0.0, frequency_penalty=0.4)
    presence = SamplingParams(seed=0, temperature=0.0, presence_penalty=0.4)
    assert [token_of(logits, frequency, output=[1] * n) for n in (1, 2, 3)] == [1, 1, 0]
    assert [token_of(logits, presence, output=[1] * n) for n in (1, 2, 3)] == [1, 1, 1]


def test_logprobs_are_the_models_own_whatever_shapes_the_draw() -> None:
    plain = SamplingParams(seed=0, temperature=0.0, num_logprobs=3)
    shaped = SamplingParams(seed=0, temperature=0.7, top_k=1, logit_bias={0: 1.0}, presence_penalty=1.0, num_logprobs=3)
    logits = [0.5, 2.5, 1.5]
    first, second = draw_from(logits, plain), draw_from(logits, shaped, output=[2])
    assert first.token_id == second.token_id == 1
    assert first.logprobs == second.logprobs


def test_no_alternatives_are_reported_if_none_are_asked_for() -> None:
    found = draw_from([0.0, 1.0], SamplingParams(seed=0, temperature=0.0, num_logprobs=0)).logprobs
    assert found is not None
    assert (len(found.top_token_ids), found.top_logprobs) == (0, ())
    assert found.logprob == pytest.approx(-math.log1p(math.exp(-1.0)), abs=1e-12)


def test_a_tiny_temperature_takes_the_likeliest() -> None:
    assert possible_tokens([700.0, -700.0, 699.0], SamplingParams(seed=0, temperature=1e-300)) == {0}


def test_a_huge_temperature_makes_all_tokens_alike() -> None:
    assert possible_tokens([30.0, -30.0, 0.0], SamplingParams(seed=0, temperature=1e9)) == {0, 1, 2}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=0)], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_fail_their_row_only(value: float, sampling: SamplingParams) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = value
    draws = sample(logits, [choice_of(sampling)] * 3)
    assert [outcome.failure is None for outcome in draws] == [True, False, True]


def test_a_row_with_every_token_suppressed_fails() -> None:
    sampling = SamplingParams(seed=0, min_tokens=1, end_token_ids=(0, 1))
    assert "every one is suppressed" in str(draw_from([0.0, 0.0], sampling).failure)


def test_a_bias_outside_the_vocabulary_fails_the_row_by_name() -> None:
    for token_id in (5, -1):
        failure = draw_from([0.0] * 5, SamplingParams(seed=0, logit_bias={token_id: 1.0})).failure
        assert f"token {token_id}" in str(failure)


@pytest.mark.parametrize("field", ["logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_every_parameter_takes_greedy_rows_off_the_short_way(field: str) -> None:
    """A greedy row without wishes takes a batched argmax; none of the wishes may be forgotten there."""
    value = {0: 50.0} if field == "logit_bias" else 50.0
    sampling = with_changes(GREEDY, **{field: value})
    (outcome,) = sample(torch.tensor([[1.0, 2.0]]), [choice_of(sampling, prompt=[1], output=[1])])
    assert outcome == Draw(0)
