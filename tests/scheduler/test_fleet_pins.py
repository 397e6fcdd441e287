"""Prefixes that stay in the caches of executors."""

from array import array

import pytest

from services.scheduler.core.fleet import NeverFits
from services.scheduler.core.pins import Pin
from shared.ids import InstanceId, RequestId
from shared.messages import Outcome
from tests.scheduler.driver import expected_output, make_capacity, make_request
from tests.scheduler.herd import LONG, A, B, Herd


def pin_of(name: str, token_ids: list[int], tenant: str = "a") -> Pin:
    return Pin(name, "model", array("i", token_ids), (("tenant", tenant),), tenant)


def num_pinned(herd: Herd, executor_id: InstanceId) -> int:
    return herd.fleet.schedulers[executor_id].pins.num_blocks


def test_a_pinned_prefix_is_computed_once_and_stays_when_others_are_evicted(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=16))
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert num_pinned(herd, A) == 5
    for number in range(8):
        herd.fleet.add(make_request(f"r{number}", [number] * 30, arrival=number))
        herd.finish()
    user = make_request("user", [*LONG, 30, 31], arrival=9)
    herd.fleet.add(user)
    herd.finish()
    assert user.num_cached_tokens == len(LONG)
    assert herd.tokens[user.request_id] == expected_output(user)
    assert {str(request_id) for request_id in herd.ends} == {*(f"r{n}" for n in range(8)), "user"}


def test_a_pin_is_made_on_executors_that_come_later_and_ends_with_unpinning(herd: Herd) -> None:
    herd.fleet.pin(pin_of("system", LONG))
    herd.attach(A)
    herd.attach(B)
    herd.finish()
    assert (num_pinned(herd, A), num_pinned(herd, B)) == (5, 5)
    herd.fleet.unpin("system")
    assert (num_pinned(herd, A), num_pinned(herd, B)) == (0, 0)
    assert all(s.blocks.num_free_blocks == s.capacity.num_blocks for s in herd.fleet.schedulers.values())


def test_unpinning_before_the_prefix_is_computed_leaves_nothing(herd: Herd) -> None:
    herd.attach(A)
    herd.fleet.pin(pin_of("system", LONG))
    herd.fleet.unpin("system")
    herd.finish()
    assert num_pinned(herd, A) == 0
    assert herd.fleet.num_requests == 0


def test_pinning_again_replaces(herd: Herd) -> None:
    herd.attach(A)
    for token_ids in (LONG, LONG[::-1][:8]):
        herd.fleet.pin(pin_of("system", token_ids))
        herd.finish()
    assert num_pinned(herd, A) == 2


def test_pins_that_share_blocks_count_them_once(herd: Herd) -> None:
    herd.attach(A)
    herd.fleet.pin(pin_of("one", LONG))
    herd.fleet.pin(pin_of("two", [*LONG[:16], 50, 51, 52, 53]))
    herd.finish()
    assert num_pinned(herd, A) == 6


def test_a_pin_too_large_for_an_executor_is_not_made_there(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=9))
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert num_pinned(herd, A) == 0
    assert herd.fleet.num_requests == 0


def test_pins_leave_room_for_what_they_promised_and_give_way_to_what_was_accepted(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=10))
    accepted = make_request("accepted", [3] * 30, arrival=0, max_tokens=10)
    herd.fleet.pin(pin_of("system", LONG))
    herd.fleet.add(accepted)
    herd.finish()
    assert herd.tokens[accepted.request_id] == expected_output(accepted)
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert herd.fleet.max_total_tokens("model") == 20
    with pytest.raises(NeverFits):
        herd.fleet.add(make_request("late", [4] * 30, arrival=1, max_tokens=10))


def test_a_pin_being_computed_goes_with_its_executor(herd: Herd) -> None:
    herd.attach(A)
    herd.fleet.pin(pin_of("system", LONG))
    herd.fleet.schedule(A)
    herd.lose(A)
    assert herd.fleet.num_requests == 0
    herd.attach(B)
    herd.finish()
    assert num_pinned(herd, B) == 5


def test_tenants_do_not_find_each_others_pins(herd: Herd) -> None:
    herd.attach(A)
    herd.fleet.pin(pin_of("system", LONG, tenant="b"))
    herd.finish()
    user = make_request("user", LONG, tenant="a")
    herd.fleet.add(user)
    herd.finish()
    assert user.num_cached_tokens == 0


def test_a_request_that_was_accepted_goes_on_where_a_pin_has_to_give_way_to_it(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=16))
    herd.fleet.pin(pin_of("system", list(range(32))))
    herd.finish()
    assert num_pinned(herd, A) == 8
    herd.attach(B, make_capacity(num_blocks=64))
    herd.finish()
    accepted = make_request("accepted", [9] * 40, arrival=1, max_tokens=10)
    herd.fleet.add(accepted)
    for _ in range(3):
        herd.step()
    herd.lose(B)
    herd.finish()
    assert herd.ends[accepted.request_id].outcome is Outcome.COMPLETED
    assert herd.tokens[accepted.request_id] == expected_output(accepted)
    assert num_pinned(herd, A) == 8, "made again when there was room again"


def test_an_idle_executor_takes_no_request_that_computes_a_pin_for_another(herd: Herd) -> None:
    herd.attach(A)
    herd.attach(B, make_capacity(max_slots=2))
    for number in range(6):
        herd.fleet.add(make_request(f"busy{number}", [number] * 8, arrival=number, max_tokens=60))
    herd.step()
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert (num_pinned(herd, A), num_pinned(herd, B)) == (5, 5)


def test_all_pins_of_an_executor_together_take_half_of_its_blocks_at_most_however_they_come(herd: Herd) -> None:
    """At once, so that some are being computed while others are asked for, and one by one."""
    herd.attach(A)
    for number in range(4):
        herd.fleet.pin(pin_of(f"at once {number}", [number] * 24))
    assert herd.fleet.num_requests == 4
    herd.fleet.pin(pin_of("too many at once", [30] * 64))
    assert herd.fleet.num_requests == 4, "24 and 16 blocks are more than 32"
    herd.finish()
    for number in range(4):
        herd.fleet.pin(pin_of(f"one by one {number}", [10 + number] * 24))
        herd.finish()
    assert num_pinned(herd, A) == 30
    assert herd.fleet.max_total_tokens("model") == 34 * 4


def test_a_pin_that_there_was_no_room_for_is_made_once_there_is(herd: Herd) -> None:
    herd.attach(A)
    herd.fleet.pin(pin_of("first", [1] * 124))
    herd.finish()
    herd.fleet.pin(pin_of("second", [2] * 120))
    herd.finish()
    assert "second" not in herd.fleet.schedulers[A].pins
    herd.fleet.unpin("first")
    herd.finish()
    assert "second" in herd.fleet.schedulers[A].pins
    assert num_pinned(herd, A) == 30


def send_more_than_fits_beside_a_pin(herd: Herd) -> None:
    """A small executor and a large one have a pin, and a request comes that fits into the small one only without it."""
    herd.attach(A, make_capacity(num_blocks=16))
    herd.fleet.pin(pin_of("system", list(range(32))))
    herd.finish()
    herd.attach(B, make_capacity(num_blocks=64))
    herd.finish()
    herd.fleet.add(make_request("large", [9] * 40, arrival=1, max_tokens=10))


def test_a_pin_that_gave_way_comes_back_while_others_run(herd: Herd) -> None:
    send_more_than_fits_beside_a_pin(herd)
    for _ in range(3):
        herd.step()
    herd.lose(B)
    for number in range(60):
        herd.fleet.add(make_request(f"short{number}", [number % 50] * 8, arrival=10 + number, max_tokens=6))
        herd.step()
        herd.step()
        assert not herd.fleet.schedulers[A].is_empty
    assert RequestId("large") in herd.ends
    assert num_pinned(herd, A) == 8


def test_a_pin_that_gave_way_waits_for_room_and_not_in_the_queue_where_others_would_wait_for_it(herd: Herd) -> None:
    send_more_than_fits_beside_a_pin(herd)
    herd.step()
    herd.lose(B)
    while RequestId("large") not in herd.ends:
        assert herd.fleet.num_requests == 1
        herd.step()
    herd.finish()
    assert num_pinned(herd, A) == 8


def test_a_pin_does_not_come_back_where_the_next_that_waits_needs_its_room(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=16, max_slots=2))
    herd.fleet.add(make_request("runs", [1] * 16, max_tokens=8))
    herd.step()
    herd.fleet.add(make_request("waits", [2] * 44, arrival=1, max_tokens=4))
    scheduler = herd.fleet.schedulers[A]
    assert scheduler.blocks.num_free_blocks == 12
    assert scheduler.has_spare_blocks(0)
    assert not scheduler.has_spare_blocks(1), "eleven for the one that waits, one for the next token of what runs"
    herd.finish()
    assert scheduler.has_spare_blocks(16)


def test_a_pin_that_cannot_be_computed_is_not_tried_again_until_it_is_pinned_anew(herd: Herd) -> None:
    herd.attach(A)
    herd.executors[A].failing_requests.add("pin-1")
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert herd.fleet.num_requests == 0
    assert num_pinned(herd, A) == 0
    herd.fleet.pin(pin_of("system", LONG))
    herd.finish()
    assert num_pinned(herd, A) == 5


def test_the_largest_pin_gives_way_first_and_the_smaller_one_stays(herd: Herd) -> None:
    herd.attach(A, make_capacity(num_blocks=20))
    herd.fleet.pin(pin_of("small", [1] * 8))
    herd.fleet.pin(pin_of("large", [2] * 28))
    herd.finish()
    pins = herd.fleet.schedulers[A].pins
    assert pins.num_blocks == 9
    assert pins.give_way()
    assert ("small" in pins, "large" in pins) == (True, False)
    assert pins.give_way()
    assert not pins.give_way()
