"""Outputs and short prompts go on while a very long prompt is computed, on a machine with modelled step times."""

from itertools import pairwise

import pytest

from services.scheduler.core.request import Request
from shared.messages import ExecutorCapacity, StepPlan
from tests.scheduler.driver import Bench, make_request

NUM_TOKENS = 32_000
ROOM = ExecutorCapacity(
    "model", num_blocks=2400, block_size=16, max_slots=16, max_model_len=40_000, max_step_tokens=2048
)
TARGET_S = 0.05


def step_seconds(plan: StepPlan) -> float:
    """20 ms for any step, 0.2 ms a token, and up to 0.5 ms more where it looks back on the whole prompt."""
    tokens = zip(plan.starts, plan.counts, strict=True)
    return 0.020 + sum(count * (0.0002 + 0.0005 * start / NUM_TOKENS) for start, count in tokens)


class Machine:
    """A bench with a clock and outputs that run all the time."""

    def __init__(self, target_step_s: float) -> None:
        self.bench = Bench(ROOM, max_chunk=256, target_step_s=target_step_s, step_seconds=step_seconds)
        self.outputs = [make_request(f"o{i}", [i] * 20, arrival=i, max_tokens=2000) for i in range(4)]
        self.bench.add(*self.outputs)
        self.ends_of_steps = [0.0]
        for _ in range(10):
            self.step()

    def step(self) -> float:
        """A step; how long it took."""
        plan = self.bench.step()
        assert plan is not None
        self.ends_of_steps.append(self.ends_of_steps[-1] + step_seconds(plan))
        return step_seconds(plan)

    def run_until_first_token(self, request: Request) -> float:
        """Step until a request has a token; how long that took."""
        start = self.ends_of_steps[-1]
        while not request.choices[0].output:
            self.step()
        return self.ends_of_steps[-1] - start


@pytest.mark.parametrize("target_step_s", [TARGET_S, 0.0])
def test_outputs_get_a_token_in_each_step_and_no_step_takes_twice_the_target(target_step_s: float) -> None:
    machine = Machine(target_step_s)
    long = make_request("long", [7] * NUM_TOKENS, arrival=10, max_tokens=1)
    machine.bench.add(long)
    num_before, first_step = len(machine.bench.output(machine.outputs[0])), len(machine.ends_of_steps)
    took_s = machine.run_until_first_token(long)
    num_steps = len(machine.ends_of_steps) - first_step
    for request in machine.outputs:
        assert len(machine.bench.output(request)) == num_before + num_steps
    gaps = [later - earlier for earlier, later in pairwise(machine.ends_of_steps[first_step - 1 :])]
    target_s = target_step_s or 2 * (0.020 + 4 * 0.0002)  # else twice a step of outputs alone
    assert max(gaps) <= 2 * target_s
    assert sum(gaps) / len(gaps) <= 1.25 * target_s  # tokens get dearer along the prompt, and what was learned lags
    alone_s = NUM_TOKENS * (0.0002 + 0.0005 / 2)
    assert took_s <= 3.5 * alone_s, "the prompt goes on too, with the part that the target leaves it"


def test_a_short_prompt_has_its_first_token_soon_while_a_long_one_is_computed() -> None:
    machine = Machine(TARGET_S)
    machine.bench.add(make_request("long", [7] * NUM_TOKENS, arrival=10, max_tokens=1))
    for _ in range(30):
        machine.step()
    for number in range(5):
        short = make_request(f"s{number}", [number + 1] * 40, arrival=20 + number, max_tokens=1)
        machine.bench.add(short)
        assert machine.run_until_first_token(short) <= 2 * TARGET_S, "within two steps"
        machine.step()


def test_a_long_prompt_alone_is_computed_as_fast_as_steps_allow() -> None:
    bench = Bench(ROOM, max_chunk=2048, target_step_s=TARGET_S, step_seconds=step_seconds)
    bench.add(make_request("long", [7] * NUM_TOKENS, max_tokens=1))
    bench.finish()
    assert bench.num_steps == -(-NUM_TOKENS // 2048)


def test_short_prompts_without_end_do_not_keep_a_long_one_from_going_on() -> None:
    machine = Machine(TARGET_S)
    long = make_request("long", [7] * 3000, arrival=10, max_tokens=1)
    machine.bench.add(long)
    num_steps = 0
    while not long.choices[0].output:
        request = make_request(f"s{num_steps}", [num_steps % 50] * 120, arrival=20 + num_steps, max_tokens=1)
        machine.bench.add(request)
        machine.step()
        num_steps += 1
        assert num_steps < 3 * 3000 / 64, "at least half of each step's prompt tokens are for the first in order"
