"""Replaying a recording: the same decisions again, and what is said when they are not."""

import asyncio
import json
import os
import struct
import subprocess
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler import __main__ as scheduler_main
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.policy import Room, who_gives_way
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.recording.answers import Planned
from services.scheduler.recording.calls import AddRequest, Apply
from services.scheduler.recording.recorded_fleet import RecordedFleet
from services.scheduler.recording.recording import start_recording
from services.scheduler.recording.records import EndOfRecording, Record
from services.scheduler.replay.__main__ import main
from services.scheduler.replay.player import Player
from services.scheduler.replay.reading import RecordingReader
from shared.actor import Identity
from shared.clock import FakeClock
from shared.codec import Decoder, encode
from shared.config import MeshConfig
from shared.ids import InstanceId, Service
from shared.process import Parts
from tests.scheduler.driver import make_capacity, make_request
from tests.scheduler.fake_executor import FakeExecutor
from tests.scheduler.harness import SCHEDULER, Mesh
from tests.scheduler.storm import WEIGHTS, Storm, record_storm, settings_of

ROOT = Path(__file__).parents[2]
EXECUTOR = InstanceId("executor-1")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, output and errors of a replay."""

    def run(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def story(tmp_path: Path) -> Path:
    """A recording with one executor and two requests, of which the second waits for blocks and is preempted."""
    clock = FakeClock()
    recording = start_recording(tmp_path, InstanceId("teller"), clock, max_bytes=1 << 20, keeps_plans=True)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    fleet.add(make_request("first", [1] * 10, max_tokens=14))
    fleet.add(make_request("second", [2] * 9, arrival=1, max_tokens=14))
    capacity = make_capacity(num_blocks=10, max_slots=2)
    fleet.add_executor(EXECUTOR, capacity)
    executor = FakeExecutor(capacity)
    while fleet.num_requests:
        clock.advance(0.01)
        plan = fleet.schedule(EXECUTOR)
        assert plan is not None
        fleet.apply(EXECUTOR, replace(executor.run(plan), duration_s=0.01))
    recording.close()
    return recording.path


def frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each frame of a file begins, and what is in it."""
    data = path.read_bytes()
    offset = data.index(b"\n") + 1
    while offset < len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        yield offset, data[offset + 8 : offset + 8 + length]
        offset += 8 + length


def change(path: Path, edit: Callable[[Record], Record]) -> int:
    """Change the first record that `edit` changes, and its checksum; its number."""
    decoder: Decoder[Record | EndOfRecording] = Decoder(Record | EndOfRecording)
    for number, (offset, content) in enumerate(frames(path)):
        record = decoder.decode(content) if number else None
        if isinstance(record, Record) and (changed := edit(record)) != record:
            new, data = encode(changed), path.read_bytes()
            frame = struct.pack("<II", len(new), zlib.crc32(new)) + new
            path.write_bytes(data[:offset] + frame + data[offset + 8 + len(content) :])
            return number
    raise AssertionError("nothing to change")


@pytest.mark.parametrize("seed", range(6))
def test_a_storm_replays_to_the_same_decisions(tmp_path: Path, replay: Run, seed: int) -> None:
    status, out, _ = replay(record_storm(tmp_path, seed), "--check", "--json")
    report = json.loads(out)
    assert (status, report["is_same"], report["problem"], report["crashes"]) == (0, True, None, [])
    summary = report["summary"]
    for what in ("refused", "completed", "cancelled", "failed", "preemptions", "executors_died", "pins"):
        assert summary[f"num_{what}"] > 0, f"the storm has nothing {what}"
    assert summary["span_s"] == pytest.approx(3.0, abs=0.1)


def test_a_recorded_fleet_decides_like_any_other(tmp_path: Path) -> None:
    recording = start_recording(tmp_path, InstanceId("s"), FakeClock(), max_bytes=1 << 30, keeps_plans=False)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    storm = Storm(fleet, 3)
    storm.rage(2000)
    storm.calm_down()
    recording.close()
    with RecordingReader(recording.path) as reader:
        player = Player(reader.header)
        assert player.play(reader.records()) is None
    assert not player.open_requests
    assert {name: scheduler.num_preemptions for name, scheduler in player.fleet.schedulers.items()} == {
        name: scheduler.num_preemptions for name, scheduler in fleet.schedulers.items()
    }


@pytest.mark.parametrize("hash_seed", ["1", "2", "3"])
def test_another_process_with_other_hashes_decides_the_same(tmp_path: Path, hash_seed: str) -> None:
    """Sets of strings have another order in each process; no decision may depend on it."""

    def python(*arguments: str, hash_seed: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    paths = []
    for folder, seed in (("here", "0"), ("there", hash_seed)):
        recorded = python("tests.scheduler.storm", str(tmp_path / folder), "8", hash_seed=seed)
        assert recorded.returncode == 0, recorded.stderr
        paths.append(Path(recorded.stdout.strip()))
    here, there = ([content for _, content in frames(path)] for path in paths)
    assert here[1:] == there[1:], "all but the headers, which tell the time"
    replayed = python("services.scheduler.replay", str(paths[0]), hash_seed=hash_seed)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


def test_the_order_in_which_tenants_are_listed_decides_nothing() -> None:
    """Their weights add up to another sum in another order: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1."""
    shares = FairShares({"a": 0.1, "b": 0.2, "c": 0.3})
    running = [make_request(f"r{number}", [1], arrival=number, tenant="a").choices[0] for number in range(2)]
    newcomer = make_request("new", [1], arrival=9, tenant="c").choices[0]
    outcomes = {
        len(list(who_gives_way(newcomer, running, dict.fromkeys(order).keys(), shares, Room(6, 100))))
        for order in permutations("abc")
    }
    assert len(outcomes) == 1


def test_drained_executors_come_in_the_order_in_which_they_were_told_to_drain() -> None:
    fleet = Fleet(lambda capacity, shares: settings_of(capacity).make_scheduler(capacity, shares))
    names = [InstanceId(f"executor-{number * 7 % 16:x}") for number in range(16)]
    for name in names:
        fleet.add_executor(name, make_capacity())
        fleet.drain_executor(name)
    assert fleet.drained_executors() == names


def test_a_plan_that_differs_is_told_with_both_sides(story: Path, replay: Run) -> None:
    def edit(record: Record) -> Record:
        if isinstance(record.answer, Planned) and record.answer.plan is not None and record.answer.step_id == 3:
            plan = replace(record.answer.plan, slots=array("i", [9]))
            return replace(record, answer=replace(record.answer, plan=plan, digest=b"12345678"))
        return record

    number = change(story, edit)
    status, out, _ = replay(story)
    assert status == 1
    assert f"Record {number}, at " in out
    assert "differs: schedule executor_id='executor-1'" in out
    assert "plan.slots: [9] recorded, [" in out
    _, out, _ = replay(story, "--json")
    report = json.loads(out)
    assert report["is_same"] is False
    assert report["problem"]["record"] == number
    assert report["summary"]["num_records"] == number
    assert {field["name"] for field in report["problem"]["fields"]} == {"digest", "plan.slots"}


@pytest.mark.parametrize("what", ["prompt", "token", "time", "request"])
def test_a_changed_input_is_noticed(tmp_path: Path, replay: Run, what: str) -> None:
    path = record_storm(tmp_path, 2)

    def edit(record: Record) -> Record:
        call = record.call
        match what, call:
            case "prompt", AddRequest(num_choices=1, model="model"):
                return replace(record, call=replace(call, prompt=array("i", [3]) + call.prompt))
            case "token", Apply(result=result) if result.token_ids and result.step_id > 3:
                tokens = array("i", [result.token_ids[0] + 100, *result.token_ids[1:]])
                return replace(record, call=replace(call, result=replace(result, token_ids=tokens)))
            case "time", Apply(result=result) if result.step_id > 3:
                return replace(record, call=replace(call, result=replace(result, duration_s=50.0)))
            case "request", AddRequest(tenant="ant"):
                return replace(record, call=replace(call, priority=-5))
        return record

    change(path, edit)
    status, out, _ = replay(path)
    assert status == 1
    assert "differs" in out


def test_a_core_that_decides_otherwise_is_noticed(story: Path, replay: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.policy.admission_headroom", lambda _num_running: 5)
    status, out, _ = replay(story)
    assert status == 1
    assert "plan.assigned" in out


def test_broken_invariants_are_told_with_the_record(story: Path, replay: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(scheduler: Scheduler) -> None:
        assert len(scheduler.running) < 2, "two are too many"

    monkeypatch.setattr(Scheduler, "check_invariants", spoil)
    assert replay(story)[0] == 0
    status, out, _ = replay(story, "--check")
    assert status == 1
    assert "contradicts itself:\n  two are too many" in out
    _, out, _ = replay(story, "--check", "--json")
    assert json.loads(out)["problem"]["kind"] == "invariant"


def test_a_crash_of_the_core_is_reproduced_with_its_traceback(tmp_path: Path, replay: Run) -> None:
    recording = start_recording(tmp_path, InstanceId("s"), FakeClock(), max_bytes=1 << 20, keeps_plans=False)
    fleet = RecordedFleet(settings_of, WEIGHTS, recording)
    with pytest.raises(KeyError):
        fleet.schedule(InstanceId("nobody"))
    recording.close()
    status, out, _ = replay(recording.path)
    assert status == 0
    assert "Record 1 raises what the core should never raise:" in out
    assert "KeyError: 'nobody'" in out
    assert "in schedule\n" in out


def test_a_last_record_that_was_cut_off_is_passed_over_and_told(story: Path, replay: Run) -> None:
    offsets = [offset for offset, _ in frames(story)]
    whole = story.read_bytes()
    for cut in range(offsets[-2] + 1, offsets[-1]):
        story.write_bytes(whole[:cut])
        status, out, _ = replay(story)
        assert status == 0
        assert f"record {len(offsets) - 2} is cut off" in out
    story.write_bytes(whole[: offsets[-1]])
    assert "ended without closing the recording" in replay(story)[1]


def test_damage_inside_a_file_is_told_and_what_is_before_it_can_be_played(story: Path, replay: Run) -> None:
    offset = [offset for offset, _ in frames(story)][5]
    data = bytearray(story.read_bytes())
    data[offset + 12] ^= 1
    story.write_bytes(data)
    status, _, err = replay(story)
    assert status == 2
    assert f"is damaged at byte {offset}, in record 5; --until 5 plays what is before it" in err
    assert replay(story, "--until", 5)[0] == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a scheduler's recording"),
        (b"\x89PNG\r\n", "is not a scheduler's recording"),
        (b"shoal scheduler recording 2\nrest", "has format 2, and this version of Shoal reads format 1"),
        (b"shoal scheduler recording 1\n", "has no records"),
        (b"shoal scheduler recording 1\n\x05\x00", "its beginning cannot be read"),
    ],
)
def test_files_that_cannot_be_replayed_are_refused_in_a_sentence(
    tmp_path: Path, replay: Run, content: bytes, says: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    status, out, err = replay(path)
    assert (status, out) == (2, "")
    assert err.startswith("shoal: ")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_file_that_is_not_there_and_a_folder_are_refused(tmp_path: Path, replay: Run) -> None:
    assert replay(tmp_path / "nothing")[0] == 2
    status, _, err = replay(tmp_path)
    assert status == 2
    assert "directory" in err


def test_the_timeline_of_a_request_tells_its_life(story: Path, replay: Run) -> None:
    status, out, _ = replay(story, "--request", "second", "--json")
    texts = [entry["text"] for entry in json.loads(out)["timeline"]]
    assert status == 0
    assert texts[0] == "arrived: 9 prompt tokens, at most 14 of output, priority 0, tenant 'a'"
    assert texts[1] == "waits in the lobby: no executor can take it"
    assert texts[2] == "placed here, waits"
    assert texts[3] == "admitted in step 1, slot 1"
    assert texts[4] == "step 1 computes tokens 0 to 5"
    assert texts[5] == "step 2 computes tokens 6 to 8, and samples"
    assert any(text.startswith("preempted: ") for text in texts)
    assert any(text.startswith("admitted in step ") and text.endswith("tokens are there already") for text in texts[6:])
    assert texts[-2:] == ["ended with 14 tokens: length", "the request ended, completed"]
    outputs = [text for text in texts if "output token" in text]
    assert outputs, "runs of single tokens are one entry"
    assert all(text.startswith("step") for text in outputs)


def test_the_timeline_of_an_unknown_request_says_so(story: Path, replay: Run) -> None:
    assert "third\n  is not in the part that was played" in replay(story, "--request", "third")[1]


def test_timelines_can_be_told_of_every_request_of_a_storm(tmp_path: Path, replay: Run) -> None:
    path = record_storm(tmp_path, 4)
    with RecordingReader(path) as reader:
        names = [record.call.request_id for record in reader.records() if isinstance(record.call, AddRequest)]
    for name in names[::7]:
        status, out, _ = replay(path, "--request", name, "--json")
        texts = [entry["text"] for entry in json.loads(out)["timeline"]]
        assert status == 0
        assert texts[0].startswith("arrived: ")
        assert len([text for text in texts if text.startswith("the request ended")]) <= 1


def test_stopping_before_a_record_prints_the_queues_there(story: Path, replay: Run) -> None:
    status, out, _ = replay(story, "--until", 5, "--json")
    report = json.loads(out)
    (executor,) = report["queues"]["executors"]
    assert status == 0
    assert (report["summary"]["num_records"], report["stopped_before"], report["ending"]) == (4, 5, None)
    assert [(choice["request_id"], choice["num_computed_tokens"]) for choice in executor["running"]] == [
        ("first", 6),
        ("second", 6),
    ]
    assert executor["num_free_blocks"] == 10 - 3 - 3
    _, out, _ = replay(story, "--until", 3)
    assert "Before record 3:\n  lobby\n    waiting: 2\n      first/0  waiting, 0 of 10 tokens computed" in out


def test_records_are_numbered_from_one(story: Path) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([str(story), "--until", "0"])
    assert exit_info.value.code == 2


async def test_what_a_scheduler_service_records_can_be_replayed(tmp_path: Path, replay: Run) -> None:
    config = SchedulerConfig(recording=str(tmp_path), tenant_weights=("a=2",), max_chunk_tokens=8)
    mesh = Mesh(config, 1 << 20)
    identity = Identity(Service.SCHEDULER, SCHEDULER, "scheduler-1")
    mesh.service = await scheduler_main.build(Parts(identity, mesh.transport, mesh.clock, MeshConfig(), config))
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.start()
    await mesh.transport.connect()
    async with mesh.service as service:
        running = asyncio.create_task(service.run())
        await mesh.ready()
        for number in range(12):
            await mesh.submit(f"r{number}", prompt=[number] * 20, max_tokens=6, seed=number, num_choices=1 + number % 2)
        await mesh.until(lambda: len(mesh.detokenizer.closed()) == 12)
        service.drain(0)
        await running
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.transport.close()
    await mesh.transport.close()
    status, out, _ = replay(tmp_path / f"{SCHEDULER}.recording", "--check", "--json")
    report: dict[str, Any] = json.loads(out)
    assert (status, report["ending"]) == (0, "the scheduler stopped")
    assert report["summary"]["num_completed"] == 12
    assert report["summary"]["num_output_tokens"] == 6 * 18


async def test_a_scheduler_records_nothing_unless_told_to(tmp_path: Path) -> None:
    mesh = Mesh(SchedulerConfig(), 1 << 20)
    identity = Identity(Service.SCHEDULER, SCHEDULER, "scheduler-1")
    service = await scheduler_main.build(Parts(identity, mesh.transport, mesh.clock, MeshConfig(), SchedulerConfig()))
    assert not isinstance(service._fleet, RecordedFleet)
