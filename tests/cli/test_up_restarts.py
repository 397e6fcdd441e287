"""When a dead process is started again."""

import pytest

from shared.cli.mesh.restarts import RestartPolicy, RestartRules
from shared.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(start=100.0)


def _die(policy: RestartPolicy, clock: FakeClock, *, after_s: float = 0.1) -> float | None:
    """One more death, and the pause that follows it passes."""
    clock.advance(after_s)
    delay_s = policy.next_delay_s()
    clock.advance(delay_s or 0.0)
    return delay_s


def test_the_first_restart_is_immediate_and_pauses_double(clock: FakeClock) -> None:
    policy = RestartPolicy(clock)
    assert [_die(policy, clock) for _ in range(5)] == [0.0, 0.5, 1.0, 2.0, 4.0]


def test_more_than_five_restarts_in_a_minute_are_too_many(clock: FakeClock) -> None:
    policy = RestartPolicy(clock)
    for _ in range(5):
        assert _die(policy, clock) is not None
    assert _die(policy, clock) is None


def test_pauses_have_a_longest(clock: FakeClock) -> None:
    policy = RestartPolicy(clock, RestartRules(max_restarts=10, window_s=1000, max_delay_s=3.0))
    assert [_die(policy, clock) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_deaths_long_ago_are_forgotten(clock: FakeClock) -> None:
    policy = RestartPolicy(clock)
    for _ in range(5):
        _die(policy, clock)
    assert _die(policy, clock, after_s=60) == 0.0


def test_a_death_every_so_often_is_restarted_for_ever(clock: FakeClock) -> None:
    policy = RestartPolicy(clock)
    delays = [_die(policy, clock, after_s=13) for _ in range(100)]
    assert None not in delays
    assert max(delay for delay in delays if delay is not None) <= 4.0


def test_a_crash_loop_is_given_up_within_a_window(clock: FakeClock) -> None:
    policy, began = RestartPolicy(clock), clock.now()
    while _die(policy, clock) is not None:
        pass
    assert clock.now() - began < 60
