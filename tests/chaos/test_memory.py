"""The rule about memory: flat passes, growing does not, whatever the first minutes and the allocator do."""

import random
from collections.abc import Callable

import pytest

from tests.chaos.memory import MAX_SLOPE_MIB_PER_MINUTE, MIB, MemoryLog, Sample, slope

INTERVAL_S = 2.0
TEN_MINUTES_S = 600.0


def watched(mib_at: Callable[[float], float], *, seconds: float = TEN_MINUTES_S, name: str = "gateway-1") -> MemoryLog:
    """A process that takes `mib_at` so many seconds after its start."""
    log = MemoryLog()
    add_life(log, mib_at, name=name, process_id=1, seconds=seconds)
    return log


def add_life(
    log: MemoryLog, mib_at: Callable[[float], float], *, name: str, process_id: int, seconds: float, since: float = 0.0
) -> None:
    for number in range(int(seconds / INTERVAL_S) + 1):
        age_s = number * INTERVAL_S
        log.add(name, process_id, Sample(1000.0 + since + age_s, int(mib_at(age_s) * MIB)))


def noisy(mib_at: Callable[[float], float], *, seed: int = 1) -> Callable[[float], float]:
    """The same, and an allocator that takes and gives back steps of up to 2 MiB."""
    draw = random.Random(seed)
    return lambda age_s: mib_at(age_s) + draw.choice([0.0, 0.0, 0.25, 0.5, 1.0, 2.0])


def test_flat_memory_passes() -> None:
    assert watched(lambda _: 80.0).growing() == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("seconds", [240.0, TEN_MINUTES_S])
def test_the_noise_of_an_allocator_is_no_growth(seed: int, seconds: float) -> None:
    assert watched(noisy(lambda _: 80.0, seed=seed), seconds=seconds).growing() == []


def test_what_fills_up_in_the_first_half_is_no_growth() -> None:
    assert watched(lambda age_s: 80.0 + min(age_s, 280.0)).growing() == []


def test_a_short_run_forgives_the_first_three_minutes() -> None:
    assert watched(lambda age_s: 80.0 + min(age_s, 175.0), seconds=240.0).growing() == []


def test_a_step_that_stays_is_no_growth() -> None:
    """A burst took a larger buffer, once."""
    assert watched(lambda age_s: 80.0 if age_s < 400 else 88.0).growing() == []


@pytest.mark.parametrize("seed", range(20))
def test_growth_is_found_behind_the_noise(seed: int) -> None:
    rate = 1.5 * MAX_SLOPE_MIB_PER_MINUTE
    (complaint,) = watched(noisy(lambda age_s: 80.0 + rate * age_s / 60, seed=seed)).growing()
    assert complaint.startswith("gateway-1 takes 1.")
    assert "MiB more every minute" in complaint


def test_growth_that_begins_late_is_found() -> None:
    assert watched(lambda age_s: 80.0 + max(0.0, age_s - 300.0) / 30).growing()


def test_growth_in_stairs_is_found() -> None:
    """A table that doubles, an arena at a time."""
    assert watched(lambda age_s: 80.0 + 8 * (age_s // 60)).growing()


def test_the_limit_is_not_allowed_itself() -> None:
    assert watched(lambda age_s: 80.0 + 1.001 * MAX_SLOPE_MIB_PER_MINUTE * age_s / 60).growing()
    assert not watched(lambda age_s: 80.0 + 0.999 * MAX_SLOPE_MIB_PER_MINUTE * age_s / 60).growing()


def test_the_slope_is_in_mib_a_minute() -> None:
    assert slope([Sample(0.0, 0), Sample(30.0, MIB), Sample(60.0, 2 * MIB)]) == pytest.approx(2.0)
    assert slope([Sample(0.0, 3 * MIB), Sample(0.0, MIB), Sample(60.0, MIB)]) == pytest.approx(-1.0)


def test_too_short_a_watch_is_no_verdict() -> None:
    assert watched(lambda _: 80.0, seconds=220.0).growing() == [
        "no gateway lived long enough to say whether its memory grows"
    ]


def test_one_process_can_speak_for_its_service_when_the_other_was_killed() -> None:
    log = watched(lambda _: 80.0)
    add_life(log, lambda _: 80.0, name="gateway-2", process_id=2, seconds=60.0)
    assert log.growing() == []


def test_each_life_of_an_instance_is_judged_by_itself() -> None:
    """The second one is smaller, and leaks; together they would look as if memory shrank."""
    log = MemoryLog()
    add_life(log, lambda _: 300.0, name="executor-1", process_id=1, seconds=200.0)
    add_life(log, lambda age_s: 80.0 + age_s / 20, name="executor-1", process_id=2, seconds=400.0, since=210.0)
    (complaint,) = log.growing()
    assert complaint.startswith("executor-1 takes 3.00 MiB more")


def test_a_life_that_was_cut_short_is_passed_over_if_another_one_says_enough() -> None:
    log = MemoryLog()
    add_life(log, lambda _: 80.0, name="executor-1", process_id=1, seconds=300.0)
    add_life(log, lambda age_s: 20.0 + age_s, name="executor-1", process_id=2, seconds=30.0, since=310.0)
    assert log.growing() == []
    assert "life 2" in log.show()


def test_the_report_has_a_line_for_each_instance() -> None:
    log = watched(lambda age_s: 80.0 + age_s / 60)
    add_life(log, lambda _: 40.0, name="scheduler-1", process_id=2, seconds=20.0)
    gateway, scheduler = log.show().splitlines()
    assert gateway.split() == ["gateway-1", "80.0", "→", "85.0", "→", "90.0", "MiB", "+1.00", "MiB", "a", "minute"]
    assert scheduler.endswith("too short to say")
