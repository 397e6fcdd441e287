"""Guesses: an output that is guessed ahead is, token by token and bit by bit, the one that plain steps give."""

import random
from dataclasses import replace

import msgspec
import pytest

from services.executor.config import ExecutorConfig
from shared.messages import CONTINUES, int32s
from shared.sampling import SamplingParams
from tests.executor.conftest import INTEGER, SMALL, MakeDriver
from tests.executor.driver import Driver, Seat
from tests.tiny_models import VOCAB_SIZE

NUM_TOKENS = 60
MOST = 6
FEW = dict.fromkeys((5, 6, 7), 100.0)
"""Only these are said, so that what was said occurs again: a tiny model with random weights hardly repeats itself."""
PARAMS = {
    "greedy": SamplingParams(seed=0, temperature=0.0, logit_bias=FEW),
    "drawn": SamplingParams(seed=7, temperature=0.4, top_k=5, logit_bias=FEW),
    "with penalties": SamplingParams(
        seed=1, temperature=0.3, frequency_penalty=0.1, repetition_penalty=1.05, logit_bias=FEW
    ),
    "with log-probabilities": SamplingParams(seed=2, temperature=0.2, num_logprobs=2, logit_bias=FEW),
    "without an early end": SamplingParams(
        seed=3, temperature=0.5, logit_bias=FEW, end_token_ids=(6,), min_tokens=NUM_TOKENS // 2
    ),
}
SETTINGS = {"float32": SMALL, "int8": INTEGER}


@pytest.fixture(params=SETTINGS)
def settings(request: pytest.FixtureRequest) -> ExecutorConfig:
    return replace(SETTINGS[request.param], max_draft_tokens=MOST)


def prompt_of(seed: int) -> list[int]:
    chance = random.Random(seed)
    return chance.choices(range(VOCAB_SIZE), k=20) + chance.choices(sorted(FEW), k=20)


def run_guessing(driver: Driver, seats: list[Seat], chance: random.Random) -> tuple[int, int]:
    """Run seats, each with guesses of random lengths, until all have their tokens; tokens guessed, and right ones."""
    num_guessed = num_right = 0
    while active := [seat for seat in seats if len(seat.output) < NUM_TOKENS]:
        drafts, room = {}, driver.runner.capacity.max_step_drafts
        for seat in active:
            if seat.num_left == 1:
                drafts[seat] = min(room, chance.choice([0, 1, MOST, MOST]))
                room -= drafts[seat]
        result = driver.step({seat: seat.num_left for seat in active}, drafts)
        num_guessed += sum(result.num_drafted)
        num_right += sum(result.num_tokens) - len(result.num_tokens)
    return num_guessed, num_right


@pytest.mark.parametrize("params", PARAMS)
def test_guessing_changes_neither_tokens_nor_log_probabilities(
    params: str, settings: ExecutorConfig, make_driver: MakeDriver
) -> None:
    driver, sampling = make_driver(settings=settings), PARAMS[params]
    plain = driver.seat(prompt_of(0), sampling)
    driver.run([plain], NUM_TOKENS)
    driver.release(plain)
    guessing = driver.seat(prompt_of(0), sampling)
    num_guessed, num_right = run_guessing(driver, [guessing], random.Random(1))
    driver.release(guessing)
    assert guessing.output[:NUM_TOKENS] == plain.output
    assert guessing.logprobs[:NUM_TOKENS] == plain.logprobs
    assert 0 < num_right < num_guessed, "else this would not test what it says"


def test_guesses_in_a_batch_change_no_neighbour(settings: ExecutorConfig, make_driver: MakeDriver) -> None:
    driver = make_driver(settings=settings)
    kinds = list(PARAMS.values())
    expected = []
    for number, sampling in enumerate(kinds):
        expected.append(driver.generate(prompt_of(number), NUM_TOKENS, sampling))
    seats = [driver.seat(prompt_of(number), sampling) for number, sampling in enumerate(kinds)]
    for seat in seats:
        driver.step({seat: seat.num_left})
    _, num_right = run_guessing(driver, seats, random.Random(2))
    for seat in seats:
        driver.release(seat)
    assert [seat.output[:NUM_TOKENS] for seat in seats] == expected
    assert num_right > 0


def test_a_row_goes_on_wherever_its_guesses_have_brought_it(settings: ExecutorConfig, make_driver: MakeDriver) -> None:
    """Plans made before the results of earlier ones: nobody knows the position but the executor."""
    driver = make_driver(settings=settings)
    expected = driver.generate(prompt_of(3), NUM_TOKENS, PARAMS["drawn"])
    seat = driver.seat(prompt_of(3), PARAMS["drawn"])
    driver.step({seat: seat.num_left})
    first = driver.plan({seat: 1}, {seat: NUM_TOKENS + MOST})  # blocks for all that may come
    row = msgspec.structs.replace(first, num_new_blocks=int32s([0]), new_block_ids=int32s())
    tokens = list(seat.output) + list(driver.runner.run(msgspec.structs.replace(first, max_drafts=int32s())).token_ids)
    while len(tokens) < NUM_TOKENS:
        plan = msgspec.structs.replace(row, starts=int32s([CONTINUES]), max_drafts=int32s([MOST]))
        tokens += driver.runner.run(plan).token_ids
    driver.release(seat)
    assert tokens[:NUM_TOKENS] == expected
