"""What is learned from an executor's results."""

import pytest

from tests.scheduler.driver import Bench, make_capacity, make_request


def test_a_typical_output_is_as_long_as_those_that_ended_lately() -> None:
    bench = Bench(make_capacity(num_blocks=256))
    assert bench.scheduler.experience.typical_output == 64
    for length in (5, 20):
        for number in range(200):
            bench.add(make_request(f"r{length}-{number}", [number % 50] * 4, arrival=number, max_tokens=length))
        bench.finish()
        assert bench.scheduler.experience.typical_output == pytest.approx(length, rel=0.05)
