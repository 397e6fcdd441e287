"""What guessing adds to a step: guesses get what is to spare, and those that were right count as computed."""

from array import array

import pytest

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.block_pool import BlockPool
from services.scheduler.core.budget import StepShape
from services.scheduler.core.drafting import Drafting
from services.scheduler.core.fairness import OUTPUT_TOKEN_WEIGHT, FairShares
from services.scheduler.core.guesses import Guesses
from services.scheduler.core.pipeline import PlannedStep
from services.scheduler.core.prefix_cache import ChainedPrefixCache
from services.scheduler.core.request import Choice
from services.scheduler.core.step_times import StepTimes
from shared.ids import BlockId
from shared.messages import StepResult
from tests.scheduler.driver import make_capacity, make_request

BLOCK_SIZE = 4


class Executor:
    """The blocks of an executor that guesses up to `max_draft_tokens`, and choices that hold some of them."""

    def __init__(self, *, num_blocks: int = 16, max_draft_tokens: int = 4, max_slots: int = 8) -> None:
        self.shares = FairShares()
        self.blocks = BlockManager(BlockPool(num_blocks), ChainedPrefixCache(), BLOCK_SIZE)
        capacity = make_capacity(num_blocks=num_blocks, max_slots=max_slots, max_draft_tokens=max_draft_tokens)
        self.guesses = Guesses(capacity, Drafting(max_draft_tokens, StepTimes()), self.blocks, self.shares)

    def output(
        self, name: str, *, success: float = 0.99, num_tokens: int = BLOCK_SIZE, max_tokens: int = 100
    ) -> Choice:
        """A choice whose prompt is computed, and whose guesses were right as often as `success` says."""
        choice = make_request(name, [ord(name)] * num_tokens, max_tokens=max_tokens).choices[0]
        assert self.blocks.admit(choice, fork_of=None, headroom=0) is not None
        choice.num_computed_tokens = choice.num_tokens_charged = num_tokens
        choice.draft_success = success
        return choice

    def allow(self, *outputs: Choice, num_tokens_left: int = 100) -> list[tuple[int, int]]:
        return self.guesses.allow(outputs, {}, num_tokens_left=num_tokens_left, num_running=len(outputs))


def test_an_executor_that_guesses_nothing_is_allowed_nothing() -> None:
    executor = Executor(max_draft_tokens=0)
    assert executor.allow(executor.output("a")) == []


def test_a_step_has_guesses_for_as_many_rows_as_it_can_hold() -> None:
    executor = Executor(max_draft_tokens=4, max_slots=6)
    outputs = [executor.output(name) for name in "abc"]
    assert executor.allow(*outputs) == [(0, 4), (1, 2)]


def test_outputs_whose_guesses_do_not_pay_are_passed_over() -> None:
    executor = Executor()
    outputs = [executor.output("a", success=0.1), executor.output("b"), executor.output("c", success=0.1)]
    assert executor.allow(*outputs) == [(1, 4)]


@pytest.mark.parametrize(("num_tokens_left", "allowed"), [(0, []), (1, [(0, 1)]), (5, [(0, 4), (1, 1)])])
def test_guesses_get_the_tokens_that_a_step_has_left(num_tokens_left: int, allowed: list[tuple[int, int]]) -> None:
    executor = Executor()
    outputs = [executor.output("a"), executor.output("b")]
    assert executor.allow(*outputs, num_tokens_left=num_tokens_left) == allowed


def test_guesses_get_blocks_beyond_those_that_their_output_got_already() -> None:
    executor = Executor(max_draft_tokens=8)
    choice = executor.output("a")
    grown: dict[int, list[BlockId]] = {0: executor.blocks.grow(choice, 1) or []}
    assert len(grown[0]) == 1
    assert executor.guesses.allow([choice], grown, num_tokens_left=100, num_running=1) == [(0, 8)]
    assert grown == {0: choice.block_table[1:]}
    assert len(choice.block_table) * BLOCK_SIZE >= choice.num_computed_tokens + 1 + 8


def test_guesses_leave_a_block_for_each_that_runs() -> None:
    executor = Executor(num_blocks=4)
    choice = executor.output("a")
    for num_running, allowed in ((3, []), (2, []), (1, [(0, 4)])):
        assert executor.guesses.allow([choice], {}, num_tokens_left=100, num_running=num_running) == allowed


def test_one_without_blocks_for_guesses_does_not_keep_others_from_theirs() -> None:
    executor = Executor(num_blocks=4, max_draft_tokens=2)
    without, within = executor.output("a"), executor.output("b", num_tokens=5)
    assert executor.allow(without, within) == [(1, 2)]
    assert len(without.block_table) == 1


def test_a_request_counts_its_guesses_and_its_choice_learns_from_them() -> None:
    executor = Executor()
    right, wrong = executor.output("a", success=0.5), executor.output("b", success=0.5)
    step = PlannedStep(1, [right, wrong], StepShape(2, 0), array("i", [4, 4]))
    tokens = array("i", [1, 2, 3, 4])
    executor.guesses.learn(step, StepResult(1, tokens, num_tokens=array("i", [3, 1]), num_drafted=array("i", [2, 3])))
    assert (right.request.num_guessed, wrong.request.num_guessed) == (2, 3)
    assert right.draft_success > 0.5 > wrong.draft_success


def test_a_tenant_is_charged_for_what_was_guessed_right_unless_it_was_before() -> None:
    executor = Executor()
    choice = executor.output("a")
    executor.shares.opened(choice.request.tenant)
    choice.num_tokens_charged += 1
    executor.guesses.count_computed(choice, 3)
    assert choice.num_computed_tokens == choice.num_tokens_charged == BLOCK_SIZE + 3
    assert executor.shares.served(choice.request.tenant) == 2 * OUTPUT_TOKEN_WEIGHT
