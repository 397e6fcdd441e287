"""The slots of an executor: who may have one by age, and when the executor hears of those that are free again."""

import pytest

from services.scheduler.core.request import Choice
from services.scheduler.core.slots import Slots
from tests.scheduler.driver import make_request


def make_choice(number: int = 0) -> Choice:
    return make_request(f"r{number}", [1], arrival=number).choices[0]


@pytest.mark.parametrize(("max_slots", "max_by_age"), [(2, 1), (3, 1), (4, 2), (9, 4)])
def test_half_of_the_slots_go_by_age(max_slots: int, max_by_age: int) -> None:
    slots = Slots(max_slots)
    held = [make_choice(number) for number in range(max_slots)]
    for number, choice in enumerate(held):
        assert slots.num_by_age_left == max(0, max_by_age - number)
        slots.give(choice, is_overdue=True)
    assert [choice.is_promoted for choice in held] == [True] * max_by_age + [False] * (max_slots - max_by_age)
    slots.check_invariants(held)
    slots.take_back(held.pop(0))
    assert slots.num_by_age_left == 1
    slots.check_invariants(held)


def test_a_single_slot_goes_by_age_every_other_time() -> None:
    slots = Slots(1)
    was_by_age = []
    for number in range(6):
        choice = make_choice(number)
        slots.give(choice, is_overdue=True)
        slots.take_back(choice)
        assert slots.num_by_age_left == (not choice.is_promoted)
        was_by_age.append(choice.is_promoted)
    assert was_by_age == [True, False] * 3


def test_as_many_are_let_past_as_half_of_the_slots_between_two_that_go_by_age() -> None:
    slots = Slots(8)
    for number in range(4):
        assert slots.may_let_past
        choice = make_choice(number)
        slots.let_past(choice)
        slots.give(choice, is_overdue=True)
        assert not choice.is_promoted, "it did not go by its own age"
    assert not slots.may_let_past
    slots.give(make_choice(4), is_overdue=False)
    assert not slots.may_let_past
    slots.give(make_choice(5), is_overdue=True)
    assert slots.may_let_past


def test_one_that_grows_old_with_its_slot_counts_once() -> None:
    slots, choice = Slots(4), make_choice()
    slots.give(choice, is_overdue=False)
    for _ in range(2):
        slots.promote(choice)
    assert choice.is_promoted
    assert slots.num_by_age_left == 1
    slots.check_invariants([choice])


def test_freed_slots_are_told_once() -> None:
    slots = Slots(2)
    choices = [make_choice(number) for number in range(2)]
    for choice in choices:
        slots.give(choice, is_overdue=False)
    slots.take_back(choices[0])
    assert (list(slots.freed), slots.num_free) == ([0], 1)
    slots.forget_freed()
    slots.take_back(choices[1])
    assert (list(slots.freed), slots.num_free) == ([1], 2)
