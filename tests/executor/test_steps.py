"""Which plans an executor runs, and what it answers: order, repetition, gaps, strangers, failure."""

from services.executor import service
from shared.messages import (
    DetachExecutor,
    StepCompleted,
    StepsMissing,
    int32s,
)
from tests.executor.stage import EXECUTOR_ID, Stage


async def test_results_carry_epoch_and_tokens(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.a.send_plan(epoch, 1, 4, 3)
    completed = await stage.a.receive(StepCompleted)
    assert (completed.executor_id, completed.epoch) == (EXECUTOR_ID, epoch)
    assert (completed.result.step_id, completed.result.token_ids) == (1, int32s([101]))
    status = stage.executor.status()
    assert (status.num_steps, status.num_tokens, status.busy_s) == (1, 7, 0.5)


async def test_plans_sent_ahead_run_in_order(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    for step_id in range(1, 5):
        await stage.a.send_plan(epoch, step_id)
    stage.runner.gate.set()
    found = [(await stage.a.receive(StepCompleted)).result.step_id for _ in range(4)]
    assert found == [1, 2, 3, 4]


async def test_a_plan_that_arrives_again_is_answered_but_not_run_again(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, 3)
    await stage.a.send_plan(epoch, 2)
    assert (await stage.a.receive(StepCompleted)).result.token_ids == int32s([102])
    await stage.run_plans(stage.a, epoch, 4, 4)
    assert stage.runner.calls == ["reset", "run 1", "run 2", "run 3", "run 4"]


async def test_a_plan_that_arrives_again_while_it_runs_is_answered_once(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    await stage.a.send_plan(epoch, 1)
    await stage.runner.wait_until_started()
    await stage.a.send_plan(epoch, 1)
    await stage.a.send_plan(epoch, 2)
    await stage.a.send_plan(epoch, 2)
    await stage.settle()
    stage.runner.gate.set()
    assert [(await stage.a.receive(StepCompleted)).result.step_id for _ in range(2)] == [1, 2]
    await stage.run_plans(stage.a, epoch, 3, 3)
    assert stage.executor.num_dropped_messages == 0


async def test_plans_after_a_gap_are_not_run_but_asked_for_from_the_gap_on(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, 1)
    await stage.a.send_plan(epoch, 3)
    assert await stage.a.receive(StepsMissing) == StepsMissing(EXECUTOR_ID, epoch, 2)
    await stage.run_plans(stage.a, epoch, 2, 3)
    assert stage.runner.calls == ["reset", "run 1", "run 2", "run 3"]


async def test_a_result_too_old_to_be_kept_is_not_made_up(stage: Stage) -> None:
    epoch = await stage.a.attach()
    await stage.run_plans(stage.a, epoch, 1, service._NUM_KEPT_RESULTS + 1)
    await stage.a.send_plan(epoch, 1)
    await stage.a.send_plan(epoch, 2)
    assert (await stage.a.receive(StepCompleted)).result.step_id == 2
    assert stage.executor.num_dropped_messages == 1


async def test_plans_beyond_the_queue_are_dropped_and_asked_for_later(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    limit = service._MAX_WAITING_PLANS
    for step_id in range(1, limit + 2):
        await stage.a.send_plan(epoch, step_id)
    await stage.settle()
    assert stage.executor.num_dropped_messages == 1
    await stage.a.send_plan(epoch, limit + 2)
    assert (await stage.a.receive(StepsMissing)).next_step_id == limit + 1
    stage.runner.gate.set()
    for step_id in range(1, limit + 1):
        assert (await stage.a.receive(StepCompleted)).result.step_id == step_id
    await stage.run_plans(stage.a, epoch, limit + 1, limit + 2)


async def test_plans_of_a_stranger_are_dropped_and_counted(stage: Stage) -> None:
    await stage.a.send_plan(1, 1)  # nobody holds the executor
    epoch = await stage.a.attach()
    await stage.b.send_plan(epoch + 1, 1)
    await stage.run_plans(stage.a, epoch, 1, 1)
    assert stage.executor.num_dropped_messages == 2
    assert stage.runner.calls == ["reset", "run 1"]


async def test_a_result_of_an_earlier_epoch_goes_nowhere_but_counts_as_work(stage: Stage) -> None:
    epoch = await stage.a.attach()
    stage.runner.gate.clear()
    await stage.a.send_plan(epoch, 1, 5)
    await stage.a.send_plan(epoch, 2, 5)
    await stage.runner.wait_until_started()
    await stage.a.tell(DetachExecutor(stage.a.id, epoch))
    epoch = await stage.b.attach()
    await stage.b.send_plan(epoch, 1, 2)
    await stage.settle()
    stage.runner.gate.set()
    assert (await stage.b.receive(StepCompleted)).epoch == epoch
    assert stage.a.has_received_nothing_more()
    assert stage.runner.calls == ["reset", "run 1", "reset", "reset", "run 1"]
    status = stage.executor.status()
    assert (status.num_steps, status.num_tokens) == (2, 7)
