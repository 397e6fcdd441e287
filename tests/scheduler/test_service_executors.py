"""The scheduler service: executors that come, go, drain, fall silent or answer twice."""

import pytest

from shared import subjects
from shared.codec import Decoder
from shared.ids import InstanceId, Service
from shared.messages import (
    AttachExecutor,
    DetachExecutor,
    Outcome,
    Presence,
    RunStep,
    SchedulerStatus,
    StepCompleted,
    StepsMissing,
)
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import EXECUTOR, PROMPT, SCHEDULER, ExecutorPeer, Mesh, Peer


async def test_a_result_that_comes_twice_counts_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=3)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    first = mesh.executor.of(RunStep)[0]
    completed = StepCompleted(EXECUTOR, first.epoch, mesh.executor.fake.run(first.plan))
    for _ in range(2):
        await mesh.executor.send(completed)
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    await mesh.settle()
    assert len(mesh.detokenizer.tokens("r")) == 1


async def test_plans_are_sent_again_when_asked_for_or_when_results_are_late(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.executor.send(StepsMissing(EXECUTOR, 1, 2))
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 3)
    assert [message.plan.step_id for message in mesh.executor.of(RunStep)] == [1, 2, 2]
    for _ in range(14):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.pass_time(0.25)
    assert [message.plan.step_id for message in mesh.executor.of(RunStep)] == [1, 2, 2, 1, 2]


async def test_plans_are_sent_again_soon_after_the_broker_is_back(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    mesh.transport.reconnect()
    sent = []
    for _ in range(12):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.pass_time(0.25)
        sent.append(len(mesh.executor.of(RunStep)))
    assert sent == [2, 4, 4, 6, 6, 8, 8, 8, 8, 8, 8, 8]  # then no sooner than ever


async def test_results_of_another_epoch_are_passed_over(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=1)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    result = mesh.executor.fake.run(mesh.executor.of(RunStep)[0].plan)
    await mesh.executor.send(StepCompleted(EXECUTOR, 7, result))
    await mesh.settle()
    assert mesh.detokenizer.closed() == []
    await mesh.executor.send(StepCompleted(EXECUTOR, 1, result))
    await mesh.until(mesh.detokenizer.closed)


async def test_requests_of_a_silent_executor_go_on_when_it_is_back(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=4)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    for _ in range(8):
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    assert mesh.service.models() == ()
    mesh.executor.restart()
    mesh.executor.is_working = True
    await mesh.executor.announce()
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 4)
    assert mesh.detokenizer.closed()[0].outcome is Outcome.COMPLETED


async def test_an_executor_that_says_it_is_free_was_lost_and_is_attached_again(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=4)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    mesh.executor.restart()
    mesh.executor.is_working = True
    await mesh.executor.announce()
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 4)


async def test_a_beat_from_before_the_attachment_is_no_loss(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.epoch = 0
    await mesh.executor.announce()
    await mesh.settle()
    assert mesh.service.models() == ("model",)


async def test_an_executor_held_by_a_living_scheduler_is_left_alone(mesh: Mesh) -> None:
    other = Peer(mesh.broker, InstanceId("scheduler-2"), AttachExecutor)
    await other.start()
    await other.beat(Service.SCHEDULER, SchedulerStatus())
    await mesh.executor.announce(held_by=InstanceId("scheduler-2"))
    await mesh.settle()
    assert mesh.executor.of(AttachExecutor) == []
    await mesh.pass_time(2.0)
    await mesh.executor.announce(held_by=InstanceId("scheduler-2"))
    await mesh.until(lambda: mesh.executor.of(AttachExecutor))
    await other.transport.close()


async def test_a_draining_executor_is_not_attached(mesh: Mesh) -> None:
    await mesh.executor.announce(is_draining=True)
    await mesh.settle()
    assert mesh.executor.of(AttachExecutor) == []


async def test_a_draining_scheduler_attaches_no_executor(mesh: Mesh) -> None:
    mesh.executor.is_working = False
    await mesh.ready()
    await mesh.submit("r")  # so that it has a reason to stay
    await mesh.settle()
    mesh.service.drain(60)
    other = ExecutorPeer(mesh.broker, InstanceId("executor-2"))
    await other.start()
    await other.announce()
    await mesh.settle()
    assert other.of(AttachExecutor) == []
    await other.transport.close()


async def test_an_attached_executor_that_drains_finishes_what_it_has_and_is_let_go(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=3)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.executor.announce(held_by=SCHEDULER, is_draining=True)
    await mesh.settle()
    assert mesh.executor.of(DetachExecutor) == []
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.executor.of(DetachExecutor))
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 3)
    assert mesh.service.models() == ()


async def test_gateways_hear_at_once_which_models_a_scheduler_takes_requests_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.actor.BEAT_INTERVAL_S", 1000.0)
    said: list[Presence] = []
    decoder = Decoder[Presence](Presence)

    async def hear(payload: bytes, _headers: object) -> None:
        said.append(decoder.decode(payload))

    def models() -> list[tuple[str, ...]]:
        return [beat.models for beat in said]

    await mesh.gateway.transport.subscribe(subjects.presence(Service.SCHEDULER), hear)
    mesh.service.announce()  # the first beat may have been a while ago, and the next one a while off
    await mesh.until(lambda: models() == [()])
    await mesh.ready()
    await mesh.until(lambda: models() == [(), ("model",)])
    await mesh.executor.announce(held_by=SCHEDULER, is_draining=True)
    await mesh.until(lambda: models()[2:3] == [()])


async def test_a_scheduler_that_begins_to_drain_lets_its_executors_go_at_once(mesh: Mesh) -> None:
    await mesh.ready()
    other = Peer(mesh.broker, InstanceId("scheduler-2"), AttachExecutor)
    await other.start()
    await other.beat(Service.SCHEDULER, SchedulerStatus())
    await mesh.settle()
    mesh.service.drain(60)
    await mesh.until(lambda: mesh.executor.of(DetachExecutor))
    await other.transport.close()


@pytest.mark.parametrize(("has_died", "is_suspect"), [(True, True), (False, False)])
async def test_an_executor_that_is_said_to_have_died_counts_against_what_it_ran(
    mesh: Mesh, has_died: bool, is_suspect: bool
) -> None:
    mesh.executor.is_working = False
    await mesh.ready()
    await mesh.submit("r", max_tokens=4)
    for _ in range(3):
        await mesh.ready()
        await mesh.until(lambda: mesh.executor.of(RunStep))
        mesh.executor.received.clear()
        mesh.executor.restart()
        await mesh.executor.announce(held_by=SCHEDULER, is_leaving=True, has_died=has_died)
        await mesh.settle()
        assert mesh.service.models() == ()
    ends = [closed.outcome for closed in mesh.detokenizer.closed()]
    assert ends == ([Outcome.FAILED] if is_suspect else []), "it may be what kills them"


async def test_an_executor_whose_holder_dies_is_asked_for_without_waiting_for_its_next_beat(mesh: Mesh) -> None:
    other = Peer(mesh.broker, InstanceId("scheduler-2"), AttachExecutor)
    await other.start()
    await other.beat(Service.SCHEDULER, SchedulerStatus())
    await mesh.settle()
    await mesh.pass_time(1.5)
    await mesh.executor.announce(held_by=InstanceId("scheduler-2"))
    await mesh.settle()
    assert mesh.executor.of(AttachExecutor) == []
    await mesh.pass_time(0.5)
    assert mesh.executor.of(AttachExecutor)
    await other.transport.close()
