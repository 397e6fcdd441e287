"""Who is let in past whom: those that wait for a prefix hold nobody back, nor does one that is next by age and does not
fit; and it gets in all the same."""

import pytest

from services.scheduler.core.prefix_cache import NoPrefixCache
from services.scheduler.core.request import Request
from tests.scheduler.driver import Bench, expected_output, make_capacity, make_request

MAX_WAIT = 200


def steps_until_end(bench: Bench, request: Request) -> int:
    """Steps from now to the end of a request that is added now."""
    bench.add(request)
    began = bench.num_steps
    while request.request_id not in bench.ended_in_step:
        assert bench.step() is not None
    return bench.ended_in_step[request.request_id] - began


def until_overdue(bench: Bench, request: Request) -> None:
    while not bench.scheduler.waiting.is_overdue(request.choices[0]):
        assert bench.step() is not None
        assert request.choices[0] in bench.scheduler.waiting, "it got in before its time"


@pytest.mark.parametrize("num_questions", [8, 16, 40])
@pytest.mark.parametrize("tenant", ["a", "other"])
def test_however_many_wait_for_one_prefix_a_short_prompt_behind_them_does_not(num_questions: int, tenant: str) -> None:
    bench = Bench(make_capacity(num_blocks=20_000, max_slots=64, max_step_tokens=64))
    bench.add(make_request("output", [40], max_tokens=3000, tenant="o"))
    document = [7] * 8000
    bench.add(*[make_request(f"q{i}", [*document, i], arrival=1 + i, max_tokens=1) for i in range(num_questions)])
    for _ in range(4):  # each looks at sixteen prompts for the first time
        bench.step()
    short = make_request("short", [3] * 8, arrival=100, max_tokens=1, tenant=tenant)
    assert steps_until_end(bench, short) == 1
    assert len(bench.scheduler.waiting) == num_questions - 1


def test_who_waits_for_a_prefix_does_not_keep_a_better_one_behind_it_from_preempting() -> None:
    """The first in order shares the prompt that is being computed; the second has a right to a slot that is held."""
    bench = Bench(make_capacity(num_blocks=500, max_slots=2, max_step_tokens=64), max_chunk=16)
    document = [7] * 800
    bench.add(make_request("document", [*document, 1], arrival=0, max_tokens=1))
    bench.add(make_request("low", [40], arrival=1, max_tokens=300, priority=2))
    bench.step()
    bench.add(make_request("question", [*document, 2], arrival=2, max_tokens=1))
    assert steps_until_end(bench, make_request("better", [3] * 8, arrival=3, max_tokens=1, priority=1)) == 1


def test_nobody_waits_for_a_prefix_that_no_cache_will_find() -> None:
    bench = Bench(make_capacity(max_step_tokens=64), cache=NoPrefixCache())
    bench.add(*[make_request(f"r{i}", [7] * 20, arrival=i) for i in range(3)])
    plan = bench.step()
    assert plan is not None
    assert len(plan.assigned) == 3


def overdue_without_room() -> tuple[Bench, Request]:
    """Six of a low priority run, and a seventh has waited for too long, for more blocks than are free."""
    bench = Bench(make_capacity(num_blocks=100, max_slots=16), max_wait_tokens=MAX_WAIT)
    bench.add(*[make_request(f"low{i}", [i] * 40, arrival=i, max_tokens=60, priority=1) for i in range(6)])
    bench.step()
    big = make_request("big", list(range(200)), arrival=50, max_tokens=4, priority=1)
    bench.add(big)
    until_overdue(bench, big)
    return bench, big


def test_one_that_is_next_by_age_and_does_not_fit_holds_no_better_priority_back() -> None:
    bench, _ = overdue_without_room()
    urgent = make_request("urgent", [49, 48] * 20, arrival=1000, max_tokens=2)
    assert steps_until_end(bench, urgent) == 2
    assert bench.output(urgent) == expected_output(urgent)


def test_only_as_many_go_past_it_as_half_of_the_slots_and_then_it_gets_in() -> None:
    """Better ones come all the time, and end at different times, so that there are never blocks enough by chance."""
    bench, big = overdue_without_room()
    number = 0
    while big.choices[0] in bench.scheduler.waiting:
        while len(bench.scheduler.waiting) < 12:
            number += 1
            prompt = [number % 50, number // 50] * 18
            bench.add(make_request(f"urgent{number}", prompt, arrival=1000 + number, max_tokens=5 + 7 * number % 40))
        bench.step()
        assert bench.num_steps < 400, "a stream of better ones goes past it for ever"
    waiting = {choice.request.request_id for choice in bench.scheduler.waiting}
    num_past = sum(f"urgent{each}" not in waiting for each in range(1, number + 1))
    assert 1 <= num_past <= 16 // 2
    bench.finish()
    assert bench.output(big) == expected_output(big)


def test_others_that_have_no_better_right_do_not_go_past_it() -> None:
    bench, big = overdue_without_room()
    same = make_request("same", [49] * 4, arrival=1000, max_tokens=2, priority=1)
    bench.add(same)
    while big.choices[0] in bench.scheduler.waiting:
        assert same.choices[0] in bench.scheduler.waiting
        bench.step()


def test_a_tenant_under_its_share_displaces_others_past_one_of_theirs_that_is_next_by_age() -> None:
    """Everything that runs and waits is one tenant's; another's request has a right to a part of it at once."""
    bench = Bench(make_capacity(num_blocks=256, max_slots=8), max_wait_tokens=MAX_WAIT)
    bench.add(*[make_request(f"flood{i}", [i] * 8, arrival=i, max_tokens=90, tenant="flood") for i in range(40)])
    bench.step()
    until_overdue(bench, make_waiting(bench))
    quiet = make_request("quiet", [49] * 8, arrival=1000, max_tokens=3, tenant="quiet")
    assert steps_until_end(bench, quiet) <= 4, "a step until its tenant was served less, and three tokens"


def make_waiting(bench: Bench) -> Request:
    """The request that has waited longest."""
    return next(iter(bench.scheduler.waiting)).request


def test_with_one_slot_every_other_turn_goes_by_age() -> None:
    bench = Bench(make_capacity(num_blocks=256, max_slots=1), max_wait_tokens=MAX_WAIT)
    bench.add(*[make_request(f"low{i}", [i] * 8, arrival=i, max_tokens=30, priority=1) for i in range(30)])
    while not all(bench.scheduler.waiting.is_overdue(choice) for choice in bench.scheduler.waiting):
        bench.step()
    bench.add(*[make_request(f"high{i}", [40, i] * 4, arrival=100 + i, max_tokens=30) for i in range(5)])
    num_before = len(bench.ended_in_step)
    while len(bench.ended_in_step) < num_before + 11:
        bench.step()
    turns = "".join(name[0] for name in list(bench.ended_in_step)[num_before:])
    assert turns in ("lhlhlhlhlhl", "hlhlhlhlhll")


def test_a_step_admits_sixteen_and_looks_at_a_few_new_prompts_only() -> None:
    """Each has to be put into a message, or to be hashed, while those that run wait for the step."""
    bench = Bench(make_capacity(num_blocks=2000, max_slots=64, max_step_tokens=600))
    bench.add(*[make_request(f"r{i}", [i % 50, i // 50] * 4, arrival=i) for i in range(100)])
    plan = bench.step()
    assert plan is not None
    assert len(plan.assigned) == 16

    bench = Bench(make_capacity(num_blocks=2000, max_slots=64, max_step_tokens=64))
    bench.add(make_request("document", [7] * 800))
    bench.step()
    questions = [make_request(f"q{i}", [*[7] * 800, i % 50, i // 50], arrival=1 + i) for i in range(100)]
    bench.add(*questions)
    bench.step()
    num_hashed = sum(question.choices[0].key_chain is not None for question in questions)
    assert 16 <= num_hashed <= 32, "sixteen when looking for somebody to make way for, sixteen when admitting"
