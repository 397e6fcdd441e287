"""The executor's metrics: every step once, with its rows, its tokens and its time."""

from msgspec.structs import replace

from services.executor.config import ExecutorConfig
from services.executor.metrics import ExecutorMetrics
from shared.messages import RowFailure, StepCompleted, StepResult, int32s
from shared.telemetry.metering import MetricsSettings, metering
from tests.executor.conftest import MakeDriver
from tests.executor.fakes import CAPACITY
from tests.executor.stage import Stage
from tests.shared.telemetry.scrape import read


async def test_steps_are_counted_with_rows_tokens_and_time(stage: Stage) -> None:
    async with metering(stage.executor, MetricsSettings()) as made:
        page = await read(made.page)
        assert page.value("shoal_executor_held") == 0
        epoch = await stage.a.attach()
        for step_id, counts in ((1, (4, 3)), (2, (1, 1, 1)), (2, (1, 1, 1))):
            await stage.a.send_plan(epoch, step_id, *counts)
            await stage.a.receive(StepCompleted)
        page = await read(made.page)
    assert page.value("shoal_executor_step_duration_seconds_count") == 2, "an answer that is given again is no step"
    assert page.value("shoal_executor_step_duration_seconds_bucket", le="0.5") == 2
    assert page.value("shoal_executor_step_duration_seconds_bucket", le="0.25") == 0
    assert page.value("shoal_executor_busy_seconds_total") == 1.0
    assert page.value("shoal_executor_step_rows_sum") == 5
    assert page.value("shoal_executor_step_tokens_sum") == page.value("shoal_executor_tokens_computed_total") == 10
    assert page.value("shoal_executor_tokens_sampled_total") == 2
    assert page.value("shoal_executor_held") == page.value("shoal_executor_epochs_total") == 1
    assert page.value("shoal_executor_slots", model="tiny") == CAPACITY.max_slots
    assert page.value("shoal_executor_blocks", model="tiny") == CAPACITY.num_blocks


async def test_guesses_are_counted_by_what_came_of_them(stage: Stage) -> None:
    stage.runner.guesses = True
    async with metering(stage.executor, MetricsSettings()) as made:
        epoch = await stage.a.attach()
        await stage.run_plans(stage.a, epoch, 1, 2)
        page = await read(made.page)
    assert page.by("shoal_executor_guesses_total", "result") == {"right": 2, "wrong": 4}
    assert page.value("shoal_executor_tokens_sampled_total") == 4


async def test_plans_that_are_not_finished_are_counted(stage: Stage) -> None:
    async with metering(stage.executor, MetricsSettings()) as made:
        epoch = await stage.a.attach()
        stage.runner.gate.clear()
        for step_id in (1, 2, 3):
            await stage.a.send_plan(epoch, step_id)
        await stage.runner.wait_until_started()
        await stage.settle()
        assert (await read(made.page)).value("shoal_executor_plans_waiting") == 3


def test_token_of_a_row_that_failed_is_none() -> None:
    metrics = ExecutorMetrics()
    plain = StepResult(1, int32s([5, 6, 7]), failures=(RowFailure(1, "not a number"),))
    metrics.step_took(3, 3, plain)
    assert (metrics.num_sampled, metrics.num_failed_rows) == (2, 1)
    metrics.step_took(2, 5, replace(plain, num_tokens=int32s([1, 2]), num_drafted=int32s([0, 3])))
    assert (metrics.num_sampled, metrics.num_failed_rows) == (4, 2)


def test_size_of_the_cache_is_that_of_its_blocks(make_driver: MakeDriver) -> None:
    for settings in (ExecutorConfig(dtype="float32"), ExecutorConfig(dtype="int8", kv_dtype="int8")):
        limited = ExecutorConfig(dtype=settings.dtype, kv_dtype=settings.kv_dtype, kv_cache_mb=8, threads=1)
        runner = make_driver(settings=limited).runner
        assert 0.9 * (8 << 20) < runner.kv_cache_bytes <= 8 << 20
