"""A choice's tokens and log-probabilities are the same, to the last bit, however steps are cut, whoever else runs."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.messages import TokenLogprobs
from shared.sampling import SamplingParams
from tests.executor.conftest import INTEGER, SMALL, MakeDriver
from tests.executor.driver import Driver, Seat
from tests.tiny_models import VOCAB_SIZE

NUM_TOKENS = 12
FORMATS = {
    "float32": SMALL,
    "bfloat16": replace(SMALL, dtype="bfloat16"),
    "int8": INTEGER,
    "int4": replace(INTEGER, dtype="int4"),
    "stored": replace(INTEGER, dtype="stored"),
    "int8 beside a float32 cache": replace(INTEGER, kv_dtype="float32"),
    "int8 by two threads": replace(INTEGER, threads=2),
}
ASKED = [
    SamplingParams(seed=1, temperature=0.0, num_logprobs=5),
    SamplingParams(seed=2, temperature=1.3, num_logprobs=5),
    SamplingParams(seed=3, temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, num_logprobs=5),
    SamplingParams(seed=4, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, num_logprobs=5),
    SamplingParams(seed=5, temperature=0.0, presence_penalty=1.5, logit_bias={7: 3.0}, num_logprobs=5),
]


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def traces(seats: list[Seat]) -> list[tuple[list[int], list[TokenLogprobs | None]]]:
    return [(seat.output, seat.logprobs) for seat in seats]


def alone(driver: Driver, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], list[TokenLogprobs | None]]:
    seat = driver.seat(prompt, sampling)
    driver.run([seat], NUM_TOKENS, chunk=60)
    driver.release(seat)
    return traces([seat])[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("formats", FORMATS)
def test_chunked_prefill_gives_the_same_bits(family: str, chunk: int, formats: str, make_driver: MakeDriver) -> None:
    driver = make_driver(family, settings=FORMATS[formats])
    prompt = prompt_of(0, 40)
    expected = alone(driver, prompt, ASKED[1])
    seat = driver.seat(prompt, ASKED[1])
    driver.run([seat], NUM_TOKENS, chunk=chunk)
    assert traces([seat]) == [expected]
    assert len(expected[0]) == NUM_TOKENS


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("formats", FORMATS)
def test_a_full_batch_gives_the_same_bits(family: str, formats: str, make_driver: MakeDriver) -> None:
    driver = make_driver(family, settings=FORMATS[formats])
    prompts = [prompt_of(number, 3 + 5 * number) for number in range(5)]
    expected = [alone(driver, prompt, sampling) for prompt, sampling in zip(prompts, ASKED, strict=True)]
    seats = [driver.seat(prompt, sampling) for prompt, sampling in zip(prompts, ASKED, strict=True)]
    driver.run(seats, NUM_TOKENS, chunk=9)
    assert traces(seats) == expected


@pytest.mark.parametrize("formats", FORMATS)
def test_a_block_of_another_size_gives_the_same_bits(formats: str, make_driver: MakeDriver) -> None:
    prompt, here = prompt_of(0, 40), FORMATS[formats]
    expected = alone(make_driver(settings=here), prompt, ASKED[1])
    assert alone(make_driver(settings=replace(here, block_size=4 * here.block_size)), prompt, ASKED[1]) == expected


@pytest.mark.parametrize("formats", FORMATS)
def test_more_threads_give_the_same_bits(formats: str, make_driver: MakeDriver) -> None:
    prompt, here = prompt_of(0, 40), FORMATS[formats]
    expected = alone(make_driver(settings=here), prompt, ASKED[1])
    for threads in (2, 3):
        assert alone(make_driver(settings=replace(here, threads=threads)), prompt, ASKED[1]) == expected


@pytest.mark.parametrize("formats", FORMATS)
@given(data=st.data())
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_schedule_changes_a_bit(formats: str, make_driver: MakeDriver, data: st.DataObject) -> None:
    """Choices join, pause, advance by any number of tokens and leave, in any mixture of prefill and decode."""
    driver = make_driver(settings=FORMATS[formats])
    lengths = data.draw(
        st.lists(st.integers(1, 30) | st.integers(55, 90), min_size=2, max_size=5), label="prompt lengths"
    )
    prompts = [prompt_of(number, length) for number, length in enumerate(lengths)]
    expected = [alone(driver, prompt, sampling) for prompt, sampling in zip(prompts, ASKED, strict=False)]
    seats = [driver.seat(prompt, sampling) for prompt, sampling in zip(prompts, ASKED, strict=False)]
    while unfinished := [seat for seat in seats if len(seat.output) < NUM_TOKENS]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique_by=id), label="rows")
        driver.step({seat: data.draw(st.integers(1, min(seat.num_left, 12)), label="tokens") for seat in chosen})
    assert traces(seats) == expected


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("formats", FORMATS)
def test_blocks_that_are_read_once_for_several_choices_give_the_same_bits(
    family: str, formats: str, make_driver: MakeDriver
) -> None:
    """Choices whose prompts begin with the same blocks, some longer than others, and one that shares nothing."""
    driver = make_driver(family, settings=FORMATS[formats])
    shared = prompt_of(99, 112)
    prompts = [shared[: 112 - 16 * (number == 2)] + prompt_of(number, 2 + 7 * number) for number in range(4)]
    prompts.append(prompt_of(5, 90))
    expected = [alone(driver, prompt, sampling) for prompt, sampling in zip(prompts, ASKED, strict=True)]
    first = driver.seat(prompts[0], ASKED[0])
    driver.run([first], 1, chunk=60)
    seats, size = [first], driver.runner.capacity.block_size
    for prompt, sampling in zip(prompts[1:4], ASKED[1:4], strict=True):
        num_shared = next(n for n, (a, b) in enumerate(zip(prompt, prompts[0], strict=False)) if a != b) // size
        blocks = first.blocks[:num_shared]
        seats.append(driver.seat(prompt, sampling, blocks=blocks, num_computed=num_shared * size))
    seats.append(driver.seat(prompts[4], ASKED[4]))
    for seat in seats[1:]:
        driver.run([seat], 1, chunk=60)
    driver.run(seats, NUM_TOKENS)
    assert traces(seats) == expected
