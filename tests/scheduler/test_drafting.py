"""Guesses as the scheduler sees them: who may guess how much, when it stops to pay, and what comes of the results."""

from array import array
from random import Random

import pytest

from services.scheduler.core.drafting import Drafting
from services.scheduler.core.pipeline import StepMismatch
from services.scheduler.core.request import Choice, Request
from services.scheduler.core.step_times import StepTimes
from shared.ids import RequestId
from shared.messages import CONTINUES, ChoiceTokens, StepPlan, StepResult
from shared.sampling import SamplingParams
from tests.scheduler.driver import Bench, make_capacity, make_request


def output_of(num_tokens: int = 0) -> Choice:
    request = Request(RequestId("r"), array("i", [1]), SamplingParams(seed=0), arrival=0, max_tokens=1000)
    choice = request.choices[0]
    for token in range(num_tokens):
        choice.extend(array("i", [token]))
    return choice


def drafting_of(num_rows: int, row_s: float, base_s: float = 0.004) -> Drafting:
    """What was learned from steps of so many outputs, with a few guesses or none, half of them right."""
    times = StepTimes()
    drafting, chance = Drafting(8, times), Random(0)
    for _ in range(100):
        guessed = chance.randint(0, 6)
        times.observe(num_rows + guessed, 0, base_s + row_s * (num_rows + guessed))
        drafting.yielded(num_rows + guessed // 2)
    return drafting


def taught(drafting: Drafting, num_right: int, *, of: int) -> Choice:
    choice = output_of()
    for _ in range(20):
        drafting.guessed(choice, of, num_right)
    return choice


def allowed(drafting: Drafting, choice: Choice) -> int:
    return dict(drafting.worth_guessing([choice])).get(0, 0)


def test_one_output_on_a_machine_that_reads_its_weights_anyway_guesses_much() -> None:
    drafting = drafting_of(num_rows=1, row_s=0.0008)
    assert allowed(drafting, taught(drafting, 8, of=8)) == 8
    assert 1 <= allowed(drafting, output_of()) <= 4


def test_guesses_that_are_wrong_end_by_themselves_but_for_a_trial_now_and_then() -> None:
    drafting = drafting_of(num_rows=1, row_s=0.0008)
    choice = taught(drafting, 0, of=4)
    lengths = []
    for token in range(64):
        lengths.append(allowed(drafting, choice))
        choice.extend(array("i", [token]))
    assert sum(lengths) == lengths.count(1) == 2


def test_many_outputs_guess_only_what_is_nearly_certain() -> None:
    drafting = drafting_of(num_rows=64, row_s=0.001)
    certain, doubtful = taught(drafting, 8, of=8), taught(drafting, 3, of=8)
    assert allowed(drafting, certain) > 0
    assert allowed(drafting, doubtful) == 0
    assert allowed(drafting_of(num_rows=1, row_s=0.001), doubtful) > 0


def test_an_output_whose_trial_goes_well_guesses_again() -> None:
    drafting = drafting_of(num_rows=4, row_s=0.001)
    choice = taught(drafting, 0, of=4)
    assert allowed(drafting, choice) == 0
    for _ in range(10):
        drafting.guessed(choice, 1, 1)
    assert allowed(drafting, choice) > 0


def running_bench(*, max_draft_tokens: int = 4, max_tokens: int = 100, num_blocks: int = 64) -> tuple[Bench, Request]:
    """A request that has its first output token."""
    bench = Bench(make_capacity(max_draft_tokens=max_draft_tokens, num_blocks=num_blocks))
    request = make_request("r", [1, 2, 3], max_tokens=max_tokens)
    bench.add(request)
    plan = planned(bench)
    bench.scheduler.apply(StepResult(plan.step_id, array("i", [10])))
    return bench, request


def planned(bench: Bench) -> StepPlan:
    plan = bench.scheduler.schedule()
    assert plan is not None
    bench.scheduler.check_invariants()
    return plan


def answered(plan: StepPlan, tokens: list[int], num_drafted: int) -> StepResult:
    """The result of a plan of one row."""
    counts = array("i", [len(tokens)])
    return StepResult(plan.step_id, array("i", tokens), num_tokens=counts, num_drafted=array("i", [num_drafted]))


def test_a_plan_that_follows_guesses_says_so_and_the_next_one_knows_again() -> None:
    bench, request = running_bench()
    first, second = planned(bench), planned(bench)
    assert (list(first.starts), list(second.starts)) == ([3], [CONTINUES])
    assert first.max_drafts[0] > 0
    (event,) = bench.scheduler.apply(answered(first, [11, 12], 1))
    assert event == ChoiceTokens(request.request_id, 0, 1, array("i", [11, 12]))
    bench.scheduler.apply(answered(second, [13], second.max_drafts[0] if second.max_drafts else 0))
    assert list(planned(bench).starts) == [6]


def test_tokens_after_an_end_token_are_dropped_and_the_choice_ends_there() -> None:
    bench = Bench(make_capacity(max_draft_tokens=4))
    request = make_request("r", [1, 2, 3], max_tokens=100, end_token_ids=(12,))
    bench.add(request)
    bench.scheduler.apply(StepResult(planned(bench).step_id, array("i", [10])))
    plan = planned(bench)
    tokens, _ = bench.scheduler.apply(answered(plan, [12, 13][: plan.max_drafts[0] + 1], plan.max_drafts[0]))
    assert isinstance(tokens, ChoiceTokens)
    assert (list(tokens.token_ids), tokens.finish_reason) == ([12], "stop")
    assert list(request.choices[0].output) == [10, 12]
    assert bench.scheduler.blocks.num_free_blocks == bench.capacity.num_blocks


@pytest.mark.parametrize("num_left", [1, 2, 3])
def test_no_guess_goes_beyond_the_last_token_that_is_wanted(num_left: int) -> None:
    bench, request = running_bench(max_draft_tokens=8, max_tokens=1 + num_left)
    for _ in range(8):
        bench.scheduler.experience.drafting.guessed(request.choices[0], 8, 8)
    plan = planned(bench)
    allowed = plan.max_drafts[0] if plan.max_drafts else 0
    assert allowed == num_left - 1
    assert bench.scheduler.schedule() is None, "all that is wanted may be on its way"


def test_nobody_gives_way_for_a_guess() -> None:
    bench, _ = running_bench(max_draft_tokens=4, num_blocks=2)
    plan = planned(bench)
    assert (list(plan.max_drafts), list(plan.num_new_blocks)) == ([], [0])


@pytest.mark.parametrize(
    ("tokens", "counts", "drafted"),
    [
        ([1, 2], [1], [1]),
        ([1, 2], [2], [0]),
        ([1] * 9, [9], [8]),
        ([1], [1, 1], [1, 1]),
        ([], [0], [1]),
        ([1], [1], []),
    ],
    ids=["too many tokens", "more than guessed", "more than allowed", "two rows", "no token", "no count of guesses"],
)
def test_a_result_that_does_not_fit_its_plan_changes_nothing(
    tokens: list[int], counts: list[int], drafted: list[int]
) -> None:
    bench, request = running_bench()
    plan = planned(bench)
    result = StepResult(
        plan.step_id, array("i", tokens), num_tokens=array("i", counts), num_drafted=array("i", drafted)
    )
    with pytest.raises(StepMismatch):
        bench.scheduler.apply(result)
    assert list(request.choices[0].output) == [10]
    bench.scheduler.apply(answered(plan, [11], 0))


def test_tenants_are_charged_for_each_token_that_they_get() -> None:
    bench, request = running_bench()
    plain, _ = running_bench(max_draft_tokens=0)
    for _ in range(20):
        plan = planned(bench)
        allowed = plan.max_drafts[0] if plan.max_drafts else 0
        bench.scheduler.apply(answered(plan, [7] * (allowed + 1), allowed))
    for _ in range(len(request.choices[0].output) - 1):
        plain.scheduler.apply(StepResult(planned(plain).step_id, array("i", [7])))
    shares, expected = bench.scheduler.waiting.shares, plain.scheduler.waiting.shares
    assert shares.served(request.tenant) == expected.served(request.tenant) > 0
