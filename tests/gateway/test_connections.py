"""The watch over slow readers."""

import asyncio

from services.gateway.connections import SlowReaderWatch
from shared.clock import FakeClock

FULL = 100


class FakeTransport(asyncio.Transport):
    """A socket whose buffer the test fills."""

    def __init__(self) -> None:
        super().__init__()
        self.num_unsent = 0
        self.was_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return (FULL // 4, FULL)

    def abort(self) -> None:
        self.was_aborted = True


class FakeConnection:
    """A connection with such a socket."""

    def __init__(self) -> None:
        self.fake = FakeTransport()
        self.transport: asyncio.Transport | None = self.fake


def run(watch: SlowReaderWatch, clock: FakeClock, connection: FakeConnection, sizes: list[int]) -> None:
    """One look a second."""
    for size in sizes:
        connection.fake.num_unsent = size
        clock.advance(1.0)
        watch.check([connection])


def watch_of(timeout_s: float) -> tuple[SlowReaderWatch, FakeClock, FakeConnection]:
    clock = FakeClock()
    return SlowReaderWatch(clock, timeout_s), clock, FakeConnection()


def test_connection_without_unsent_data_is_left_alone() -> None:
    watch, clock, connection = watch_of(3.0)
    run(watch, clock, connection, [0] * 20)
    assert not connection.fake.was_aborted


def test_connection_that_takes_nothing_is_cut_off_in_time() -> None:
    watch, clock, connection = watch_of(3.0)
    run(watch, clock, connection, [50, 80, 120])
    assert watch.num_cut_off == 0
    run(watch, clock, connection, [120])
    assert watch.num_cut_off == 1
    assert connection.fake.was_aborted


def test_connection_that_takes_a_little_now_and_then_is_left_alone() -> None:
    watch, clock, connection = watch_of(3.0)
    run(watch, clock, connection, [120, 120, 119, 119, 119, 118, 118, 118, 117, 117])
    assert not connection.fake.was_aborted


def test_more_in_a_full_buffer_means_that_some_was_taken() -> None:
    watch, clock, connection = watch_of(3.0)
    run(watch, clock, connection, [120, 120, 130, 130, 140, 140, 150, 150])
    assert not connection.fake.was_aborted


def test_empty_buffer_starts_anew() -> None:
    watch, clock, connection = watch_of(3.0)
    run(watch, clock, connection, [120, 120, 120, 0, 120, 120, 120])
    assert not connection.fake.was_aborted


def test_closed_connection_is_passed_over() -> None:
    watch, clock, connection = watch_of(1.0)
    connection.fake.num_unsent = 120
    connection.transport = None
    for _ in range(5):
        clock.advance(1.0)
        watch.check([connection])
    assert watch.num_cut_off == 0


def test_goodbye_is_said_first_and_the_connection_is_cut_off_later() -> None:
    watch, clock, connection = watch_of(2.0)
    said = []
    watch.say_goodbye_with(connection, lambda: said.append("goodbye"))
    run(watch, clock, connection, [120] * 3)
    assert (said, connection.fake.was_aborted) == (["goodbye"], False)
    run(watch, clock, connection, [130] * 3)
    assert (said, connection.fake.was_aborted) == (["goodbye"], True)


def test_forgotten_goodbye_is_not_said() -> None:
    watch, clock, connection = watch_of(2.0)
    said: list[str] = []
    watch.say_goodbye_with(connection, lambda: said.append("goodbye"))
    watch.forget(connection)
    run(watch, clock, connection, [120] * 3)
    assert (said, connection.fake.was_aborted) == ([], True)
