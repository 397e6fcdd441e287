"""Time as an argument."""

import pytest

from shared.clock import FakeClock, SystemClock


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    moments = [clock.now() for _ in range(1000)]
    assert moments == sorted(moments)


def test_a_fake_clock_stands_still_until_moved() -> None:
    clock = FakeClock(start=10.0)
    assert clock.now() == clock.now() == 10.0
    clock.advance(2.5)
    clock.advance(0)
    assert clock.now() == 12.5


def test_a_fake_clock_cannot_go_back() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="cannot go back by 1 s"):
        clock.advance(-1)
    assert clock.now() == 0.0
