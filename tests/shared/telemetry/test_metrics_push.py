"""Sending metrics in a thread of their own: slow and broken receivers hold nobody up."""

import logging
import threading
import time

import pytest

from shared.telemetry.metrics import Snapshot
from shared.telemetry.metrics_push import Pusher

PATIENCE_S = 20.0


class FakeExporter:
    """Keeps the moments it was given; can be held up, and can fail."""

    def __init__(self) -> None:
        self.moments: list[int] = []
        self.errors: list[Exception] = []
        self.troubles: list[str] = []
        self.may_send = threading.Event()
        self.may_send.set()
        self.is_sending = threading.Event()
        self.is_closed = False

    def export(self, snapshot: Snapshot, now_ns: int) -> str | None:
        self.is_sending.set()
        self.may_send.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop()
        if self.troubles:
            return self.troubles.pop(0)
        self.moments.append(now_ns)
        return None

    def close(self) -> None:
        self.is_closed = True


async def test_the_last_one_is_sent_before_the_end() -> None:
    exporter = FakeExporter()
    pusher = Pusher(exporter)
    pusher.push((), 1)
    await pusher.close((), 2, PATIENCE_S)
    assert exporter.moments == [1, 2]
    assert exporter.is_closed
    assert pusher.num_pushed == 2


async def test_while_one_is_on_its_way_others_do_not_pile_up() -> None:
    exporter = FakeExporter()
    exporter.may_send.clear()
    pusher = Pusher(exporter)
    pusher.push((), 1)
    assert exporter.is_sending.wait(PATIENCE_S)
    for moment in range(2, 100):
        pusher.push((), moment)
    exporter.may_send.set()
    await pusher.close((), 100, PATIENCE_S)
    assert exporter.moments == [1, 2, 100]


async def test_a_receiver_that_does_not_answer_is_waited_for_only_so_long() -> None:
    exporter = FakeExporter()
    exporter.may_send.clear()
    pusher = Pusher(exporter)
    pusher.push((), 1)
    began = time.monotonic()
    await pusher.close((), 2, 0.05)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert exporter.is_closed
    exporter.may_send.set()


async def test_what_an_exporter_raises_is_logged_and_the_next_one_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    exporter = FakeExporter()
    exporter.errors.append(OSError("no such certificate"))
    pusher = Pusher(exporter)
    with caplog.at_level(logging.WARNING):
        pusher.push((), 1)
        await pusher.close((), 2, PATIENCE_S)
    assert exporter.moments == [2]
    (record,) = caplog.records
    assert vars(record)["error"] == "OSError: no such certificate"


async def test_log_tells_when_trouble_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    exporter = FakeExporter()
    exporter.troubles = ["refused"] * 5
    pusher = Pusher(exporter)
    with caplog.at_level(logging.INFO):
        for moment in range(7):
            exporter.is_sending.clear()
            pusher.push((), moment)
            assert exporter.is_sending.wait(PATIENCE_S)
        await pusher.close((), 7, PATIENCE_S)
    assert [record.message for record in caplog.records] == [
        "metrics cannot be sent; trying with the next ones",
        "metrics are sent again",
    ]
    assert vars(caplog.records[0])["error"] == "refused"
