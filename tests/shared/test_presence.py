"""The directory of who is alive: beats join, drain, leave; silence is death, unless it was our own."""

import dataclasses

import msgspec
import pytest

from shared.clock import FakeClock
from shared.ids import InstanceId, Service
from shared.messages import DetokenizerStatus, ExecutorStatus, Presence
from shared.presence import BEAT_INTERVAL_S, DEAD_AFTER_S, Directory


@dataclasses.dataclass
class _World:
    clock: FakeClock
    directory: Directory

    def pass_time(self, seconds: float) -> list[Presence]:
        """Time goes by in steps as the owner of a directory takes them; returns who died on the way."""
        dead = []
        while seconds > 1e-9:
            step = min(seconds, 0.25)
            self.clock.advance(step)
            seconds -= step
            dead += self.directory.expire()
        return dead


@pytest.fixture
def world() -> _World:
    clock = FakeClock(start=1000.0)
    return _World(clock, Directory(clock))


def _beat(name: str = "executor-1", *, models: tuple[str, ...] = ("tiny",), is_draining: bool = False) -> Presence:
    service = Service(name.partition("-")[0])
    status = ExecutorStatus() if service is Service.EXECUTOR else DetokenizerStatus()
    return Presence(service, InstanceId(name), name, models, status, is_draining=is_draining)


def _leaving(beat: Presence) -> Presence:
    return msgspec.structs.replace(beat, is_leaving=True)


def test_an_instance_joins_with_its_first_beat(world: _World) -> None:
    assert world.directory.observe(_beat()) is True
    assert world.directory.get(InstanceId("executor-1")) == _beat()
    assert world.directory.alive(Service.EXECUTOR) == [_beat()]


def test_a_beat_that_says_nothing_new_is_not_news_but_is_kept(world: _World) -> None:
    world.directory.observe(_beat())
    later = msgspec.structs.replace(_beat(), num_dropped_messages=3)
    assert world.directory.observe(later) is False
    assert world.directory.get(InstanceId("executor-1")) == later


def test_beginning_to_drain_is_news_and_ends_new_work(world: _World) -> None:
    world.directory.observe(_beat())
    assert world.directory.observe(_beat(is_draining=True)) is True
    assert [beat.instance_id for beat in world.directory.alive(Service.EXECUTOR)] == ["executor-1"]
    assert world.directory.available(Service.EXECUTOR) == []


def test_another_set_of_models_is_news(world: _World) -> None:
    world.directory.observe(_beat(models=()))
    assert world.directory.observe(_beat(models=("tiny",))) is True


def test_leaving_is_news_once(world: _World) -> None:
    world.directory.observe(_beat())
    assert world.directory.observe(_leaving(_beat())) is True
    assert world.directory.get(InstanceId("executor-1")) is None
    assert world.directory.observe(_leaving(_beat())) is False
    assert world.directory.alive(Service.EXECUTOR) == []


def test_who_left_does_not_also_expire(world: _World) -> None:
    world.directory.observe(_beat())
    world.directory.observe(_leaving(_beat()))
    assert world.pass_time(10) == []


def test_silence_is_death_after_three_missed_beats(world: _World) -> None:
    world.directory.observe(_beat())
    assert world.pass_time(3 * BEAT_INTERVAL_S) == []
    assert world.pass_time(DEAD_AFTER_S) == [_beat()]
    assert world.directory.get(InstanceId("executor-1")) is None
    assert world.pass_time(10) == []


def test_death_is_noticed_within_two_seconds(world: _World) -> None:
    world.directory.observe(_beat())
    assert world.pass_time(2.0) == [_beat()]


def test_only_the_silent_one_dies(world: _World) -> None:
    world.directory.observe(_beat("executor-1"))
    world.directory.observe(_beat("executor-2"))
    for _ in range(20):
        world.directory.observe(_beat("executor-2"))
        world.pass_time(BEAT_INTERVAL_S)
    assert [beat.instance_id for beat in world.directory.alive(Service.EXECUTOR)] == ["executor-2"]


def test_the_dead_may_come_back(world: _World) -> None:
    world.directory.observe(_beat())
    world.pass_time(10)
    assert world.directory.observe(_beat()) is True


def test_our_own_standstill_is_not_held_against_others(world: _World) -> None:
    world.directory.observe(_beat())
    world.pass_time(0.5)
    world.clock.advance(60)  # this process was frozen; the beats of a minute wait unread
    assert world.directory.expire() == []
    assert world.directory.alive(Service.EXECUTOR) == [_beat()]


def test_who_died_during_our_standstill_is_found_dead_afterwards(world: _World) -> None:
    world.directory.observe(_beat())
    world.clock.advance(60)
    assert world.directory.expire() == []
    assert world.pass_time(DEAD_AFTER_S + BEAT_INTERVAL_S + 0.25) == [_beat()]


def test_a_call_once_a_second_is_no_standstill(world: _World) -> None:
    world.directory.observe(_beat())
    world.clock.advance(1.0)
    world.directory.expire()
    world.clock.advance(1.0)
    assert world.directory.expire() == [_beat()]


def test_instances_are_told_apart_by_service_and_model_and_come_in_order(world: _World) -> None:
    for beat in (_beat("executor-2"), _beat("executor-1", models=("other",)), _beat("detokenizer-1")):
        world.directory.observe(beat)
    assert [beat.instance_id for beat in world.directory.alive(Service.EXECUTOR)] == ["executor-1", "executor-2"]
    assert [beat.instance_id for beat in world.directory.alive(Service.EXECUTOR, "tiny")] == ["executor-2"]
    assert [beat.instance_id for beat in world.directory.available(Service.EXECUTOR, "other")] == ["executor-1"]
    assert world.directory.alive(Service.GATEWAY) == []


def test_only_the_executor_is_missing_if_a_scheduler_waits_for_one(world: _World) -> None:
    for name in ("tokenizer-1", "detokenizer-1"):
        world.directory.observe(_beat(name))
    nobody = world.directory.num_available("tiny")
    assert [service for service, count in nobody.items() if not count] == [Service.SCHEDULER, Service.EXECUTOR]
    world.directory.observe(_beat("scheduler-1", models=()))  # it names the models of the executors that it holds
    waiting = world.directory.num_available("tiny")
    assert [service for service, count in waiting.items() if not count] == [Service.EXECUTOR]
    world.directory.observe(_beat("executor-1"))
    world.directory.observe(_beat("scheduler-1"))
    assert all(world.directory.num_available("tiny").values())


def test_who_has_not_beaten_for_a_moment_has_not_been_heard_since(world: _World) -> None:
    asked_at = world.clock.now()
    assert world.directory.has_heard_all(Service.EXECUTOR, asked_at), "there is nobody to hear"
    world.directory.observe(_beat())
    world.directory.observe(_beat("executor-2"))
    assert world.directory.has_heard_all(Service.EXECUTOR, asked_at)
    world.pass_time(1.0)
    world.directory.observe(_beat())
    assert not world.directory.has_heard_all(Service.EXECUTOR, asked_at + 0.5)
    assert world.directory.has_heard_all(Service.DETOKENIZER, asked_at + 0.5), "others do not matter"
    world.pass_time(DEAD_AFTER_S - 0.5)
    world.directory.observe(_beat())
    assert world.directory.has_heard_all(Service.EXECUTOR, asked_at + 0.5), "who is dead does not count"
