"""Who has begun to beat, and who is stuck."""

import pytest

from shared.cli.mesh.liveness import HUNG_AFTER_S, Liveness
from shared.clock import FakeClock
from shared.ids import InstanceId, Service
from shared.messages import DetokenizerStatus, Presence


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def liveness(clock: FakeClock) -> Liveness:
    return Liveness(clock)


def _beat(life: int = 1, *, is_leaving: bool = False) -> Presence:
    instance_id = InstanceId(f"detokenizer-{life}")
    return Presence(Service.DETOKENIZER, instance_id, "detok", (), DetokenizerStatus(), is_leaving=is_leaving)


def _pass(clock: FakeClock, liveness: Liveness, seconds: float, *, is_connected: bool = True) -> list[str]:
    hung = []
    for _ in range(round(seconds / 0.5)):
        clock.advance(0.5)
        hung += liveness.hung(is_connected=is_connected)
    return hung


def test_the_first_beat_is_news(liveness: Liveness) -> None:
    assert not liveness.has_heard("detok")
    assert liveness.observe(_beat())
    assert liveness.has_heard("detok")
    assert not liveness.observe(_beat())


def test_the_first_beat_of_the_next_life_is_news_again(liveness: Liveness) -> None:
    liveness.observe(_beat(life=1))
    liveness.forget("detok")
    assert not liveness.observe(_beat(life=1)), "a beat of the dead that came late"
    assert liveness.observe(_beat(life=2))


def test_who_died_has_a_last_beat_unless_it_said_goodbye(liveness: Liveness) -> None:
    assert liveness.forget("detok") is None
    liveness.observe(_beat(life=1))
    assert liveness.forget("detok") == _beat(life=1)
    assert liveness.forget("detok") is None
    liveness.observe(_beat(life=2))
    liveness.observe(_beat(life=2, is_leaving=True))
    assert liveness.forget("detok") is None


def test_who_beats_is_never_stuck(clock: FakeClock, liveness: Liveness) -> None:
    for _ in range(200):
        liveness.observe(_beat())
        assert _pass(clock, liveness, 0.5) == []


def test_who_falls_silent_is_stuck_and_said_once(clock: FakeClock, liveness: Liveness) -> None:
    liveness.observe(_beat())
    assert _pass(clock, liveness, HUNG_AFTER_S) == []
    assert _pass(clock, liveness, HUNG_AFTER_S) == ["detok"]


def test_who_never_beat_is_still_starting(clock: FakeClock, liveness: Liveness) -> None:
    assert _pass(clock, liveness, 10 * HUNG_AFTER_S) == []


def test_who_left_or_died_is_not_stuck(clock: FakeClock, liveness: Liveness) -> None:
    liveness.observe(_beat(life=1))
    liveness.observe(_beat(life=1, is_leaving=True))
    assert _pass(clock, liveness, 2 * HUNG_AFTER_S) == []
    liveness.observe(_beat(life=2))
    liveness.forget("detok")
    assert _pass(clock, liveness, 2 * HUNG_AFTER_S) == []


def test_silence_without_a_broker_does_not_count(clock: FakeClock, liveness: Liveness) -> None:
    liveness.observe(_beat())
    assert _pass(clock, liveness, 10 * HUNG_AFTER_S, is_connected=False) == []
    assert _pass(clock, liveness, HUNG_AFTER_S - 1) == []
    assert _pass(clock, liveness, 2) == ["detok"]


def test_our_own_standstill_does_not_count(clock: FakeClock, liveness: Liveness) -> None:
    liveness.observe(_beat())
    clock.advance(10 * HUNG_AFTER_S)
    assert liveness.hung(is_connected=True) == []
