"""The computing thread by itself: order, dropping, failure."""

import os
import queue
import threading
import time
from collections.abc import Iterator

import pytest

from services.executor.step_thread import Report, StepFinished, StepThread, StepThreadFailed
from shared.messages import int32s
from tests.executor.fakes import WAIT_S, FakeRunner, plan


class Reports:
    """What the thread reported."""

    def __init__(self) -> None:
        self._events: queue.Queue[StepFinished | StepThreadFailed] = queue.Queue()

    def __call__(self, event: StepFinished | StepThreadFailed) -> None:
        self._events.put(event)

    def next(self) -> StepFinished | StepThreadFailed:
        return self._events.get(timeout=WAIT_S)

    def next_result(self) -> tuple[int, int]:
        event = self.next()
        assert isinstance(event, StepFinished)
        return event.epoch, event.result.step_id

    @property
    def is_empty(self) -> bool:
        return self._events.empty()


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def thread(runner: FakeRunner, reports: Reports) -> Iterator[StepThread]:
    thread = StepThread(runner, reports)
    thread.start()
    yield thread
    runner.gate.set()
    thread.stop()


def test_waiting_plans_run_back_to_back_without_anyone_reading_results(
    thread: StepThread, runner: FakeRunner, reports: Reports
) -> None:
    """No event loop is there at all: the results alone come out, in order."""
    thread.reset(1)
    for step_id in (1, 2, 3):
        thread.submit(1, plan(step_id))
    assert [reports.next_result() for _ in range(3)] == [(1, 1), (1, 2), (1, 3)]
    assert runner.calls == ["reset", "run 1", "run 2", "run 3"]


def test_a_new_epoch_drops_what_waits_and_starts_with_empty_slots(
    thread: StepThread, runner: FakeRunner, reports: Reports
) -> None:
    thread.reset(1)
    runner.gate.clear()
    for step_id in (1, 2, 3):
        thread.submit(1, plan(step_id))
    assert runner.started.acquire(timeout=WAIT_S)
    thread.reset(2)
    thread.submit(2, plan(1))
    runner.gate.set()
    assert [reports.next_result() for _ in range(2)] == [(1, 1), (2, 1)]
    assert runner.calls == ["reset", "run 1", "reset", "run 1"]


def test_a_result_tells_how_many_tokens_were_computed(thread: StepThread, reports: Reports) -> None:
    thread.reset(1)
    thread.submit(1, plan(1, 5, 1, 1))
    event = reports.next()
    assert isinstance(event, StepFinished)
    assert (event.num_tokens, event.result.token_ids) == (7, int32s([101]))


def test_a_failure_is_reported_once_and_ends_the_thread(
    thread: StepThread, runner: FakeRunner, reports: Reports
) -> None:
    runner.error = ZeroDivisionError("a bug")
    thread.reset(1)
    thread.submit(1, plan(1))
    thread.submit(1, plan(2))
    assert reports.next() == StepThreadFailed(runner.error)
    thread.stop()
    assert reports.is_empty
    assert runner.calls == ["reset", "run 1"]


def test_stopping_finishes_the_plan_that_runs_and_drops_the_others(
    thread: StepThread, runner: FakeRunner, reports: Reports
) -> None:
    thread.reset(1)
    runner.gate.clear()
    thread.submit(1, plan(1))
    thread.submit(1, plan(2))
    assert runner.started.acquire(timeout=WAIT_S)
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    deadline = time.monotonic() + WAIT_S
    while thread._queue.qsize() < 2:  # the second plan, and the word that this is the end
        assert time.monotonic() < deadline, "it was not told to stop"
        time.sleep(0.001)
    assert reports.is_empty
    runner.gate.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert reports.next_result() == (1, 1)
    assert runner.calls == ["reset", "run 1"]


def test_a_thread_that_never_started_can_be_stopped(runner: FakeRunner, reports: Report) -> None:
    StepThread(runner, reports).stop()


def test_only_the_computing_thread_stands_back(runner: FakeRunner, reports: Reports) -> None:
    class Niceness(FakeRunner):
        found = -1

        def reset(self) -> None:
            self.found = os.getpriority(os.PRIO_PROCESS, 0)

    before = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = Niceness()
    thread = StepThread(niceness, reports, nice=3)
    thread.start()
    thread.reset(1)
    thread.stop()
    assert niceness.found == min(before + 3, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
