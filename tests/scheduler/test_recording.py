"""What is recorded of a fleet's calls, and what becomes of the file."""

import inspect
import logging
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.scheduler.core.fleet import Fleet, NeverFits
from services.scheduler.core.pins import Pin
from services.scheduler.core.request import Request
from services.scheduler.recording.answers import Raised, Told
from services.scheduler.recording.calls import AddRequest, Apply, Cancel, Schedule
from services.scheduler.recording.file import FrameWriter
from services.scheduler.recording.recorded_fleet import RecordedFleet
from services.scheduler.recording.recording import NUM_KEPT, Recording, start_recording
from services.scheduler.recording.records import Record
from services.scheduler.replay.reading import RecordingReader
from shared.clock import FakeClock
from shared.errors import ConfigError
from shared.ids import InstanceId, RequestId
from shared.messages import StepResult, TokenLogprobs
from shared.sampling import SamplingParams
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.storm import WEIGHTS, record_storm, settings_of

EXECUTOR = InstanceId("executor-1")

READS = {
    "check_invariants",
    "drained_executors",
    "get",
    "max_total_tokens",
    "max_total_tokens_of_all",
    "models",
    "num_requests",
    "pins",
    "schedulers",
    "stranded",
    "waiting",
}
"""What a fleet offers that changes nothing, so that it need not be recorded."""


def start(folder: Path, *, max_bytes: int = 1 << 20, name: str = "scheduler-1") -> Recording:
    return start_recording(folder, InstanceId(name), FakeClock(), max_bytes=max_bytes, keeps_plans=False)


def read(path: Path) -> list[Record]:
    with RecordingReader(path) as reader:
        return list(reader.records())


def ending(path: Path) -> str:
    with RecordingReader(path) as reader:
        list(reader.records())
        return reader.ending


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.001)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recording]:
    recording = start(tmp_path)
    yield recording
    recording.close()


@pytest.fixture
def fleet(recording: Recording) -> RecordedFleet:
    return RecordedFleet(settings_of, WEIGHTS, recording)


def test_whatever_a_fleet_offers_is_recorded_or_changes_nothing() -> None:
    offers = {name for name in vars(Fleet) if not name.startswith("_")}
    recorded = {name for name in vars(RecordedFleet) if not name.startswith("_")}
    assert offers - recorded == READS


def test_all_of_a_request_is_recorded() -> None:
    parameters = set(inspect.signature(Request).parameters)
    assert set(AddRequest.__struct_fields__) == parameters


def test_an_idle_executor_that_is_asked_after_every_message_does_not_fill_the_recording(
    fleet: RecordedFleet, recording: Recording
) -> None:
    """But what it is given when it is asked is there, and so is that it had to wait for a result."""
    for name in ("one", "two"):
        fleet.add_executor(InstanceId(name), make_capacity())
    for _ in range(100):
        assert fleet.schedule(InstanceId("one")) is None
    fleet.add(make_request("r", [1] * 4, max_tokens=1))
    plans = [fleet.schedule(InstanceId(name)) for name in ("one", "one", "two")]
    assert [plan is None for plan in plans] == [False, True, True]
    recording.close()
    calls = [type(record.call).__name__ for record in read(recording.path)]
    assert calls == ["AddExecutor", "AddExecutor", "AddRequest", "Schedule", "Schedule"]


def test_each_call_makes_one_record(fleet: RecordedFleet, recording: Recording) -> None:
    pin = Pin("system", "model", array("i", range(8)))
    fleet.add_executor(EXECUTOR, make_capacity())
    fleet.pin(pin)
    fleet.pin(pin)
    fleet.unpin("system")
    recording.close()
    assert [type(record.call).__name__ for record in read(recording.path)] == [
        "AddExecutor",
        "PinPrefix",
        "PinPrefix",
        "Unpin",
    ]


def test_a_record_holds_the_moment_the_call_and_what_came_of_it(tmp_path: Path) -> None:
    clock = FakeClock(100.0)
    recording = start_recording(tmp_path, InstanceId("s"), clock, max_bytes=1 << 20, keeps_plans=False)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    clock.advance(1.5)
    fleet.add(make_request("r", [1, 2, 3]))
    clock.advance(1.0)
    fleet.cancel(RequestId("r"))
    recording.close()
    added, cancelled = read(recording.path)
    assert isinstance(added.call, AddRequest)
    assert (added.at, added.call.prompt, added.answer) == (1.5, array("i", [1, 2, 3]), None)
    assert (cancelled.at, cancelled.call) == (2.5, Cancel(RequestId("r")))
    assert isinstance(cancelled.answer, Told)
    assert [ended.request_id for ended in cancelled.answer.ended] == ["r"]


def test_the_header_holds_what_the_fleet_was_made_with(fleet: RecordedFleet, recording: Recording) -> None:
    recording.close()
    with RecordingReader(recording.path) as reader:
        assert reader.header.tenant_weights == WEIGHTS
        assert reader.header.scheduler_id == "scheduler-1"
        assert reader.header.shoal_version not in ("", "unknown")


def test_what_a_call_raises_is_recorded_and_raised(fleet: RecordedFleet, recording: Recording) -> None:
    fleet.add_executor(EXECUTOR, make_capacity(num_blocks=4))
    with pytest.raises(NeverFits):
        fleet.add(make_request("r", [1] * 20))
    with pytest.raises(KeyError):
        fleet.schedule(InstanceId("nobody"))
    recording.close()
    _, refused, wrong = read(recording.path)
    assert refused.answer == Raised("NeverFits", "24 tokens of prompt and output cannot fit; at most 16 can")
    assert isinstance(wrong.call, Schedule)
    assert wrong.answer == Raised("KeyError", "'nobody'")


def test_log_probabilities_are_left_out(fleet: RecordedFleet, recording: Recording) -> None:
    fleet.add_executor(EXECUTOR, make_capacity())
    request = Request(
        RequestId("r"),
        array("i", [1, 2]),
        SamplingParams(seed=0, num_logprobs=1),
        arrival=0,
        max_tokens=2,
        model="model",
    )
    fleet.add(request)
    fleet.schedule(EXECUTOR)
    fleet.apply(EXECUTOR, StepResult(1, array("i", [5]), (TokenLogprobs(-0.123456789),), duration_s=0.01))
    assert request.choices[0].logprobs == [TokenLogprobs(-0.123456789)]
    recording.close()
    applied = read(recording.path)[-1].call
    assert isinstance(applied, Apply)
    assert applied.result == StepResult(1, array("i", [5]), (None,), duration_s=0.01)


def test_only_its_owner_can_read_a_recording(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        recording = start(tmp_path / "recordings")
    finally:
        os.umask(before)
    recording.close()
    assert stat.S_IMODE(recording.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recording.path.parent.stat().st_mode) == 0o700


def test_at_its_limit_a_recording_ends_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        path = record_storm(tmp_path, 1, max_bytes=20_000)
    assert 15_000 < path.stat().st_size <= 20_000
    assert ending(path) == "the file reached its limit"
    assert [record.getMessage() for record in caplog.records] == ["the recording ends here"]


def test_the_fleet_goes_on_when_the_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = FrameWriter(tmp_path / "recording", 1 << 20)
    recording = Recording(writer, InstanceId("scheduler-1"), FakeClock(), keeps_plans=False)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    writer.failure = "No space left on device"
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            fleet.add(make_request(f"r{number}", [1, 2], arrival=number))
    recording.close()
    assert fleet.num_requests == 3
    assert [getattr(record, "reason", "") for record in caplog.records] == ["No space left on device"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_failure_to_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "open", lambda *_arguments: full)
    writer = FrameWriter(tmp_path / "recording", 1 << 20)
    monkeypatch.undo()
    writer.append(b"content")
    writer.close()
    assert writer.failure is not None
    assert "No space left" in writer.failure


def test_records_reach_the_file_while_the_recording_goes_on(tmp_path: Path) -> None:
    clock = FakeClock()
    recording = start_recording(tmp_path, InstanceId("s"), clock, max_bytes=1 << 20, keeps_plans=False)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    fleet.add(make_request("first", [1, 2]))
    clock.advance(0.5)
    fleet.add(make_request("second", [1, 2], arrival=1))
    until(lambda: recording.path.stat().st_size > 100 and len(read(recording.path)) == 2)
    assert ending(recording.path) == "the process ended without closing the recording, or still runs"
    recording.close()
    assert ending(recording.path) == "the scheduler stopped"


def test_a_folder_keeps_the_latest_recordings(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a recording")
    for number in range(NUM_KEPT + 3):
        recording = start(tmp_path, name=f"scheduler-{number:02}")
        recording.close()
        os.utime(recording.path, (number, number))
    kept = sorted(path.name for path in tmp_path.glob("*.recording"))
    assert kept == [f"scheduler-{number:02}.recording" for number in range(3, NUM_KEPT + 3)]
    assert other.exists()


def test_a_folder_that_cannot_be_written_is_a_sentence_for_the_operator(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"SHOAL_SCHEDULER_RECORDING=.*file: cannot record there"):
        start(tmp_path / "file")


def test_an_earlier_recording_is_never_written_over(tmp_path: Path) -> None:
    start(tmp_path).close()
    with pytest.raises(ConfigError, match="exists"):
        start(tmp_path)
