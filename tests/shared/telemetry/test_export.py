"""The queue to the collector: nobody waits for it, whatever the collector does, and what is dropped is counted."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from shared.messages import Span
from shared.telemetry.export import Loss, QueueExporter
from tests.shared.telemetry.spans import span_of

PATIENCE_S = 30.0


class _Collector:
    """What was sent; it can be slow, refuse, or break."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.trouble: str | None = None
        self.error: Exception | None = None
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.was_asked = threading.Event()
        self.was_given_up = threading.Event()

    def send(self, spans: Sequence[Span]) -> Loss | None:
        self.was_asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        if self.trouble is not None:
            return Loss(len(spans), self.trouble)
        self.spans += spans
        return None

    def give_up(self) -> None:
        self.was_given_up.set()
        self.may_answer.set()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_spans_arrive_in_order_after_a_pause() -> None:
    collector = _Collector()
    exporter = QueueExporter(collector, pause_s=0.01)
    spans = [span_of(number) for number in range(10)]
    for span in spans:
        exporter.offer(span)
    _until(lambda: len(collector.spans) == 10)
    assert collector.spans == spans
    assert exporter.num_dropped == 0
    exporter.close(PATIENCE_S)


def test_many_are_sent_without_a_pause() -> None:
    collector = _Collector()
    exporter = QueueExporter(collector, pause_s=3600)
    for number in range(2000):
        exporter.offer(span_of(number))
    _until(lambda: len(collector.spans) >= 513)
    exporter.close(PATIENCE_S)
    assert len(collector.spans) == 2000


def test_a_collector_that_does_not_answer_costs_spans_and_no_time() -> None:
    collector = _Collector()
    collector.may_answer.clear()
    exporter = QueueExporter(collector, max_waiting=100, pause_s=0.001)
    exporter.offer(span_of(0))
    assert collector.was_asked.wait(PATIENCE_S)
    began = time.monotonic()
    for number in range(1, 1000):
        exporter.offer(span_of(number))
    assert time.monotonic() - began < PATIENCE_S / 2  # it is a millisecond; the collector holds on for PATIENCE_S
    assert exporter.num_dropped == 999 - 100
    collector.may_answer.set()
    exporter.close(PATIENCE_S)
    assert len(collector.spans) == 101


def test_what_a_collector_refuses_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    collector = _Collector()
    collector.trouble = "out of order"
    exporter = QueueExporter(collector, pause_s=0.001)
    for number in range(3):
        exporter.offer(span_of(number))
        _until(lambda: exporter.num_dropped > number)  # noqa: B023  # called before the next round
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert vars(warning)["error"] == "out of order"
    collector.trouble = None
    exporter.offer(span_of(3))
    _until(lambda: len(collector.spans) == 1)
    exporter.close(PATIENCE_S)
    assert [record.message for record in caplog.records][-1] == "spans arrive again"
    assert exporter.num_dropped == 3


def test_a_sender_that_breaks_is_no_end_of_the_thread() -> None:
    collector = _Collector()
    collector.error = RuntimeError("cannot be encoded")
    exporter = QueueExporter(collector, pause_s=0.001)
    exporter.offer(span_of(0))
    _until(lambda: exporter.num_dropped == 1)
    collector.error = None
    exporter.offer(span_of(1))
    _until(lambda: len(collector.spans) == 1)
    exporter.close(PATIENCE_S)


def test_closing_sends_what_waits() -> None:
    collector = _Collector()
    exporter = QueueExporter(collector, pause_s=3600)
    exporter.offer(span_of(0))
    exporter.close(PATIENCE_S)
    assert len(collector.spans) == 1


def test_closing_waits_no_longer_than_it_was_told() -> None:
    collector = _Collector()
    collector.may_answer.clear()
    exporter = QueueExporter(collector, pause_s=0.001)
    exporter.offer(span_of(0))
    assert collector.was_asked.wait(PATIENCE_S)
    exporter.offer(span_of(1))
    began = time.monotonic()
    exporter.close(0.05)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert collector.was_given_up.is_set()
