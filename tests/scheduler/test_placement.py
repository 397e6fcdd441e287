"""Which executor gets a request: exact where everything is known, and even over time where it is not."""

import random
from collections import Counter

import pytest

from services.scheduler.core.fairness import FairShares
from services.scheduler.core.placement import SoonestPlacement
from shared.ids import InstanceId
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.herd import make_scheduler
from tests.scheduler.virtual_time import TimedWorld
from tests.scheduler.world import Rules, World

ROOMY = make_capacity(num_blocks=2000, block_size=16, max_slots=32, max_step_tokens=512)
QUICK = (0.018, 0.0005)
"""Seconds of a step, and of each of its tokens."""
SLOW = (0.054, 0.0015)


def homes(world: World) -> list[int]:
    """How many choices wait on each executor."""
    return [len(scheduler.waiting) for scheduler in world.fleet.schedulers.values()]


@pytest.mark.parametrize(("num_queued_tokens", "chosen"), [(60, 0), (100, 1)])
def test_a_prefix_is_worth_as_many_tokens_of_queue_as_it_has(num_queued_tokens: int, chosen: int) -> None:
    """The first executor has 144 of 160 tokens and a queue of one: its tokens and a typical output of 64."""
    world = World(Rules(depth=1))
    for _ in range(2):
        world.attach(ROOMY)
    prefix = list(range(40)) * 4
    first, other = make_request("first", prefix[:145], max_tokens=1), make_request("other", [9] * 8, arrival=1)
    world.send(first)
    world.send(other)
    while world.work():
        pass
    scheduler, empty = world.fleet.schedulers.values()
    scheduler.experience.typical_output = empty.experience.typical_output = 64.0
    scheduler.add(make_request("queued", [1] * num_queued_tokens, arrival=2))
    before = homes(world)
    world.send(make_request("r", prefix, arrival=3))
    assert [now - then for now, then in zip(homes(world), before, strict=True)].index(1) == chosen


@pytest.mark.parametrize("rate", [1, 3, 8])
def test_equal_executors_get_equal_parts_whatever_they_were_doing(rate: float) -> None:
    """The tokens of one that runs few outputs take longest, so it must not look slow for having little to do."""
    world = TimedWorld()
    for _ in range(2):
        world.attach(ROOMY, *QUICK)
    draw, moment = random.Random(rate), 0.0
    for number in range(150):
        moment += draw.expovariate(rate)
        prompt = [draw.randrange(50) for _ in range(draw.randint(20, 200))]
        world.arrive(make_request(f"r{number}", prompt, arrival=number, max_tokens=draw.randint(20, 120)), moment)
    world.run_until()
    parts = Counter(world.homes.values())
    assert min(parts.values()) >= 60, f"of 150: {parts}"
    world.finish()


def test_an_executor_three_times_as_slow_gets_work_only_when_the_other_has_much() -> None:
    def parts(rate: float) -> list[int]:
        world = TimedWorld()
        members = [world.attach(ROOMY, *times) for times in (QUICK, SLOW)]
        draw, moment = random.Random(1), 0.0
        for number in range(120):
            moment += draw.expovariate(rate)
            prompt = [draw.randrange(50) for _ in range(100)]
            world.arrive(make_request(f"r{number}", prompt, arrival=number, max_tokens=60), moment)
        world.run_until()
        world.finish()
        counted = Counter(world.homes.values())
        return [counted[member] for member in members]

    quick, slow = parts(2)
    assert slow <= 5, "nothing is gained by waiting for three times as long"
    quick, slow = parts(40)
    assert 20 <= slow <= 45, f"when both are full the parts are about 3:1, not {quick}:{slow}"


def test_a_new_executor_is_taken_for_as_fast_as_the_others() -> None:
    world = TimedWorld()
    world.attach(ROOMY, *QUICK)
    for number in range(8):
        world.arrive(make_request(f"r{number}", [number] * 50, arrival=number, max_tokens=100))
    world.run_until(1.0)
    new = world.attach(ROOMY, *QUICK)
    for number in range(8, 16):
        world.arrive(make_request(f"r{number}", [number] * 50, arrival=number, max_tokens=100), 1.0 + number / 1000)
    world.run_until()
    assert [world.homes[request_id] for request_id in list(world.sent)[8:]].count(new) >= 6
    world.finish()


def test_a_draining_executor_gets_nothing_new_even_if_it_has_the_prefix_and_nothing_to_do() -> None:
    world = World(Rules(depth=1))
    first, second = world.attach(ROOMY), world.attach(ROOMY)
    prompt = list(range(40)) * 3
    running = make_request("running", prompt, max_tokens=50)
    world.send(running)
    world.work()
    world.drain(first)
    for number in range(20):
        world.send(make_request(f"r{number}", [*prompt, number], arrival=1 + number))
    assert [homes(world), len(world.fleet.schedulers[InstanceId(second)].waiting)] == [[0, 20], 20]
    world.finish()
    assert list(world.members) == [second], "let go once it had finished"


def test_what_waits_moves_to_an_executor_with_nothing_left_but_not_from_its_prefix_for_nothing() -> None:
    world = TimedWorld()
    world.attach(make_capacity(num_blocks=2000, block_size=16, max_slots=1, max_step_tokens=512), *QUICK)
    for number in range(6):
        world.arrive(make_request(f"r{number}", [number] * 50, arrival=number, max_tokens=50), number / 1000)
    world.run_until(0.1)
    late = world.attach(make_capacity(num_blocks=2000, block_size=16, max_slots=1, max_step_tokens=512), *QUICK)
    world.run_until()
    assert 2 <= list(world.homes.values()).count(late) <= 3
    alone = 50 * (0.018 + 0.0005) + 50 * 0.0005
    assert world.now <= 0.1 + 3.5 * alone, "the six are shared, so all ends in about the time of three"
    world.finish()


@pytest.mark.parametrize(("num_free", "chosen"), [(50, 0), (49, 1)])
def test_blocks_that_a_prompt_would_have_to_wait_for_count_against_an_executor(num_free: int, chosen: int) -> None:
    """Nothing else differs, so that of equals the first is chosen."""
    able = [make_scheduler(make_capacity(num_blocks=100), FairShares()) for _ in range(2)]
    for _ in range(100 - num_free):
        able[0].blocks.pool.take()
    request = make_request("r", [1] * 200)
    assert SoonestPlacement().choose(request, able) is able[chosen]
