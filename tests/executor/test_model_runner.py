"""What a plan does to slots, blocks and tokens, seen through the results of a real tiny model."""

import random
from typing import Any

import msgspec
import pytest
import torch

from services.executor.batch import ForwardBatch
from services.executor.kv_cache import KVCache
from services.executor.slots import PlanError
from shared.messages import StepPlan, int32s
from shared.sampling import SamplingParams
from tests.executor.conftest import MakeDriver
from tests.executor.driver import GREEDY, Driver
from tests.tiny_models import VOCAB_SIZE

PENALISED = SamplingParams(
    seed=9, temperature=1.2, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.4, num_logprobs=3
)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


class Poisoned:
    """A model whose logits for some rows are replaced."""

    def __init__(self, model: Any, poison: dict[int, float]) -> None:
        self.model = model
        self.poison = poison

    def __call__(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        logits: torch.Tensor = self.model(batch, kv_cache).clone()
        for row, value in self.poison.items():
            logits[row, 17] = value
        return logits


def test_a_slot_and_its_blocks_are_used_again_at_once(driver: Driver) -> None:
    first, second = prompt_of(1, 30), prompt_of(2, 25)
    expected = driver.generate(second, 10)
    seat = driver.seat(first)
    driver.run([seat], 10)
    slot, blocks = seat.slot, seat.blocks
    driver.release(seat)
    again = driver.seat(second)
    driver.run([again], 10)
    assert again.slot == slot
    assert set(again.blocks) <= set(blocks)
    assert driver.plans[-10].released == int32s([slot])  # in the same plan as the new assignment
    assert again.output == expected


def test_shared_prefix_blocks_are_read_without_being_computed_again(driver: Driver) -> None:
    prompt = prompt_of(3, 22)  # 5 full blocks of 4, and 2 tokens
    expected = driver.generate(prompt, 8)
    owner = driver.seat(prompt)
    driver.run([owner], 1)
    sharer = driver.seat(prompt, blocks=owner.blocks[:5], num_computed=20)
    driver.run([sharer], 8)
    assert driver.plans[-8].counts == int32s([2])
    assert sharer.output == expected


def test_rows_of_one_step_read_blocks_that_another_row_of_it_writes(driver: Driver) -> None:
    prompt = prompt_of(4, 22)
    expected = driver.generate(prompt, 1)
    driver.step({})
    owner = driver.seat(prompt[:20])
    driver.plan({owner: 20})  # deals out the blocks; the plan itself is not run
    owner.is_assigned = False
    sharer = driver.seat(prompt, blocks=owner.blocks, num_computed=20)
    driver.step({sharer: 2, owner: 20})
    assert sharer.output == expected


def test_a_copied_block_goes_its_own_way(driver: Driver) -> None:
    """Two choices of one request share a half-filled block; the second copies it before it writes."""
    prompt = prompt_of(5, 18)  # 4 full blocks and 2 tokens of the fifth
    warm = SamplingParams(seed=7, temperature=1.5)
    first = driver.seat(prompt, warm)
    driver.run([first], 1)
    copy = driver.copy_block(first.blocks[4])
    second = driver.seat(prompt, warm, choice_index=1, blocks=[*first.blocks[:4], copy], num_computed=17)
    driver.run([first, second], 12)
    for seat in (first, second):
        alone = driver.seat(prompt, warm, choice_index=seat.choice_index)
        driver.run([alone], 12)
        assert seat.output == alone.output
        driver.release(alone)
    assert first.output != second.output


def test_copies_are_made_one_after_the_other(driver: Driver) -> None:
    prompt = prompt_of(6, 8)
    owner = driver.seat(prompt)
    driver.run([owner], 1)
    middle = driver.copy_block(owner.blocks[0])
    last = driver.copy_block(middle)
    reader = driver.seat(prompt, blocks=[last, owner.blocks[1]], num_computed=7)
    driver.run([reader], 5)
    assert reader.output == driver.generate(prompt, 5)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize("num_before", [1, 5, 11])
def test_a_choice_assigned_again_with_its_output_goes_on_as_if_undisturbed(
    driver: Driver, sampling: SamplingParams, num_before: int
) -> None:
    prompt = prompt_of(7, 15)
    undisturbed = driver.seat(prompt, sampling)
    driver.run([undisturbed], 12)
    stopped = driver.seat(prompt, sampling)
    driver.run([stopped], num_before)
    driver.release(stopped)
    resumed = driver.seat(prompt, sampling, output=stopped.output)
    driver.run([resumed], 12, chunk=6)
    assert resumed.output == undisturbed.output
    assert stopped.logprobs + resumed.logprobs == undisturbed.logprobs


def test_penalties_would_differ_if_output_were_taken_for_prompt(driver: Driver) -> None:
    """Else the test above would say nothing about them. The seed is one for which the draw shows it."""
    prompt = prompt_of(7, 15)
    undisturbed = driver.seat(prompt, PENALISED)
    driver.run([undisturbed], 12)
    mistaken = driver.seat(prompt + undisturbed.output[:11], PENALISED)
    driver.run([mistaken], 1)
    expected, found = undisturbed.logprobs[11], mistaken.logprobs[0]
    assert expected is not None
    assert found is not None
    assert found.top_logprobs == expected.top_logprobs  # the model sees the same tokens
    assert mistaken.output != undisturbed.output[11:]


def test_choices_of_one_request_draw_different_tokens(driver: Driver) -> None:
    sampling = SamplingParams(seed=3, temperature=1.0)
    seats = [driver.seat(prompt_of(8, 6), sampling, choice_index=index) for index in range(3)]
    driver.run(seats, 10)
    assert len({tuple(seat.output) for seat in seats}) == 3


def test_plans_made_before_results_are_known_run_all_the_same(driver: Driver) -> None:
    """The executor appends what it samples, so a decode row needs no token id from outside."""
    prompt = prompt_of(9, 10)
    expected = driver.generate(prompt, 4)
    seat = driver.seat(prompt)
    plans = [driver.plan({seat: 10})]
    for position in range(10, 13):
        seat.num_computed = position
        seat.tokens.append(-1)  # not known here yet
        plans.append(driver.plan({seat: 1}))
    results = [driver.runner.run(plan) for plan in plans]
    assert [result.token_ids[0] for result in results] == expected


def test_rows_that_do_not_end_at_the_last_known_token_do_not_sample(driver: Driver) -> None:
    seats = [driver.seat(prompt_of(10, 9)), driver.seat(prompt_of(11, 5))]
    result = driver.step({seats[0]: 4, seats[1]: 5})
    assert driver.plans[-1].sampled_rows == int32s([1])
    assert len(result.token_ids) == 1
    assert len(seats[1].output) == 1


def test_results_are_in_the_order_of_sampled_rows(driver: Driver) -> None:
    prompts = [prompt_of(12, 6), prompt_of(13, 7)]
    expected = [driver.generate(prompt, 1)[0] for prompt in prompts]
    seats = [driver.seat(prompt) for prompt in prompts]
    plan = driver.plan({seats[0]: 6, seats[1]: 7})
    result = driver.runner.run(msgspec.structs.replace(plan, sampled_rows=int32s([1, 0])))
    assert list(result.token_ids) == expected[::-1]


def test_a_plan_without_rows_only_changes_slots(driver: Driver) -> None:
    seat = driver.seat([1, 2, 3])
    driver.run([seat], 1)
    driver.release(seat)
    result = driver.step({})
    assert (list(result.token_ids), result.logprobs, result.failures) == ([], (), ())
    with pytest.raises(PlanError, match=f"slot {seat.slot} is empty"):
        driver.runner.run(StepPlan(step_id=99, released=int32s([seat.slot])))


def test_logprobs_travel_only_if_some_row_asks(driver: Driver) -> None:
    plain, curious = driver.seat([1, 2, 3]), driver.seat([4, 5], SamplingParams(seed=0, num_logprobs=2))
    assert driver.step({plain: 3}).logprobs == ()
    result = driver.step({plain: 1, curious: 2})
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None
    assert len(result.logprobs[1].top_token_ids) == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_whose_logits_are_not_numbers_fails_alone(
    driver: Driver, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(14, 5), prompt_of(15, 6), prompt_of(16, 7)]
    drawn = SamplingParams(seed=1)
    expected = [driver.generate(prompts[0], 2), driver.generate(prompts[2], 2, drawn)]
    seats = [driver.seat(prompts[0]), driver.seat(prompts[1]), driver.seat(prompts[2], drawn)]
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner, "_model", Poisoned(driver.runner._model, {1: value}))
        result = driver.step({seat: len(prompt) for seat, prompt in zip(seats, prompts, strict=True)})
    assert [(failure.row, "not all finite" in failure.reason) for failure in result.failures] == [(1, True)]
    driver.step(dict.fromkeys(seats, 1))  # a plan that was on its way already still runs
    assert [seats[0].output, seats[2].output] == expected


def test_the_longest_sequence_can_be_filled_to_its_last_token(make_driver: MakeDriver) -> None:
    driver = make_driver()
    limit = driver.runner.capacity.max_model_len
    seat = driver.seat(prompt_of(17, limit - 3))
    driver.run([seat], 3, chunk=60)
    assert len(seat.tokens) == limit
    driver.step({seat: 1})  # one that was sent ahead
    with pytest.raises(PlanError, match=f"beyond {limit} tokens"):
        driver.step({seat: 1})


def test_warming_up_leaves_empty_slots_and_changes_nothing(driver: Driver) -> None:
    expected = driver.generate([3, 1, 4], 6)
    driver.step({})
    driver.runner.warm_up()
    seats = [driver.seat([3, 1, 4]) for _ in range(driver.runner.capacity.max_slots)]
    driver.run(seats, 6)
    assert all(seat.output == expected for seat in seats)


def test_reset_empties_every_slot(driver: Driver) -> None:
    seats = [driver.seat([1, 2]) for _ in range(3)]
    driver.run(seats, 1)
    driver.runner.reset()
    for seat in seats:
        with pytest.raises(PlanError, match="is empty"):
            driver.runner.run(StepPlan(step_id=1, released=int32s([seat.slot])))


def test_duration_is_measured(driver: Driver) -> None:
    seat = driver.seat([1, 2])
    assert 0 < driver.step({seat: 2}).duration_s < 10
