"""The scheduler's metrics: what came in, what was computed for whom, and what came of it."""

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from services.scheduler.config import SchedulerConfig
from shared.errors import PromptTooLong
from shared.ids import InstanceId, RequestId
from shared.messages import (
    AdoptRequest,
    CancelRequest,
    ReplayLog,
    ReplayRequest,
    RequestAccepted,
    RequestAdopted,
    RequestRefused,
    ResumedChoice,
    RunStep,
    StepsMissing,
    StopStringFound,
)
from shared.telemetry.metering import MetricsSettings, metering
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import DETOKENIZER, EXECUTOR, GATEWAY, PROMPT, ExecutorPeer, Mesh
from tests.shared.telemetry.scrape import Page, read

OF = {"executor": "executor-1", "model": "model"}
Scrape = Callable[[], Awaitable[Page]]


@pytest.fixture
async def scrape(mesh: Mesh) -> AsyncIterator[Scrape]:
    """Reads the metrics of a scheduler that has an executor and a detokenizer."""
    await mesh.ready()
    async with metering(mesh.service, MetricsSettings()) as made:
        yield lambda: read(made.page)


def endings(page: Page) -> dict[tuple[str, str], float]:
    """How many attempts ended how: by ending and code."""
    samples = page.families["shoal_scheduler_requests"].samples
    return {(sample.labels["ending"], sample.labels["code"]): sample.value for sample in samples}


async def run_to_the_end(mesh: Mesh, name: str, **fields: object) -> None:
    await mesh.submit(name, **fields)
    await mesh.until(lambda: mesh.detokenizer.closed(name))
    await mesh.settle()


async def test_requests_steps_and_tokens_are_counted(mesh: Mesh, scrape: Scrape) -> None:
    for name in ("a", "b"):
        await run_to_the_end(mesh, name, max_tokens=5)
    page = await scrape()
    assert page.value("shoal_scheduler_requests_accepted_total") == 2
    assert endings(page) == {("completed", ""): 2}
    assert page.value("shoal_scheduler_output_tokens_total") == 10
    cached = page.value("shoal_scheduler_prompt_tokens_total", source="cached")
    assert cached >= mesh.executor.capacity.block_size, "the second prompt is the first one's"
    assert page.value("shoal_scheduler_prompt_tokens_total", source="computed") == 2 * len(PROMPT) - cached
    assert page.value("shoal_scheduler_steps_total", **OF) == len(mesh.executor.of(RunStep))
    assert page.value("shoal_scheduler_plan_duration_seconds_count") == len(mesh.executor.of(RunStep))
    assert page.value("shoal_scheduler_apply_duration_seconds_count") == len(mesh.executor.of(RunStep))
    assert page.value("shoal_scheduler_queue_duration_seconds_count", model="model") == 2
    assert page.value("shoal_scheduler_requests_retained") == 2


async def test_queues_slots_and_blocks_are_those_of_each_executor(mesh: Mesh, scrape: Scrape) -> None:
    capacity = mesh.executor.capacity
    mesh.executor.is_working = False
    for number in range(capacity.max_slots + 2):
        await mesh.submit(f"r{number}", prompt=[number + 1] * 3, max_tokens=2)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.settle()
    page = await scrape()
    assert page.value("shoal_scheduler_choices_running", **OF) == capacity.max_slots
    assert page.value("shoal_scheduler_choices_waiting", **OF) == 2
    assert page.value("shoal_scheduler_choices_waiting", executor="", model="") == 0
    assert page.value("shoal_scheduler_slots", **OF) == capacity.max_slots
    assert page.total("shoal_scheduler_blocks", **OF) == capacity.num_blocks
    assert page.value("shoal_scheduler_blocks", **OF, state="held") >= capacity.max_slots
    assert page.value("shoal_scheduler_executors", model="model") == 1
    assert page.value("shoal_scheduler_requests_open") == capacity.max_slots + 2


async def test_age_of_the_queue_is_that_of_the_oldest_without_a_step(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    for number in range(mesh.executor.capacity.max_slots):
        await mesh.submit(f"r{number}", prompt=[number + 1] * 3)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.settle()
    assert (await scrape()).value("shoal_scheduler_queue_age_seconds") == 0, "all have begun"
    await mesh.submit("late")
    await mesh.settle()
    mesh.clock.advance(1.25)
    await mesh.submit("later")
    await mesh.settle()
    assert (await scrape()).value("shoal_scheduler_queue_age_seconds") == 1.25


async def test_what_waits_for_an_executor_is_counted_without_one(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.executor.announce(is_leaving=True)
    await mesh.settle()
    page = await scrape()
    assert page.value("shoal_scheduler_choices_waiting", executor="", model="") == 1
    assert page.total("shoal_scheduler_choices_running") == 0
    assert page.by("shoal_scheduler_executors_lost_total", "reason") == {"left": 1}
    assert page.value("shoal_scheduler_failovers_total") == 1


async def test_executor_that_falls_silent_has_died(mesh: Mesh, scrape: Scrape) -> None:
    await mesh.pass_time(3)
    assert (await scrape()).by("shoal_scheduler_executors_lost_total", "reason") == {"died": 1}


async def test_request_that_an_idle_executor_takes_over_has_migrated(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    for number in range(mesh.executor.capacity.max_slots + 1):
        await mesh.submit(f"r{number}", prompt=[number + 1] * 3, max_tokens=40)
    await mesh.settle()
    second = ExecutorPeer(mesh.broker, InstanceId("executor-2"))
    await second.start()
    await second.announce()
    await mesh.until(lambda: second.of(RunStep))
    page = await scrape()
    assert page.value("shoal_scheduler_migrations_total") >= 1
    assert page.value("shoal_scheduler_failovers_total") == 0


async def test_refusals_have_their_code(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("open")  # without it the scheduler would leave at once
    await mesh.submit("long", prompt=[1] * 10_000)
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    mesh.service.drain(60)
    await mesh.submit("late")
    await mesh.until(lambda: len(mesh.gateway.of(RequestRefused)) == 2)
    assert endings(await scrape()) == {("refused", PromptTooLong.code): 1, ("refused", "unavailable"): 1}


async def test_cancelled_and_late_requests_are_counted_once(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("cancelled")
    await mesh.submit("late", timeout_ms=500)
    await mesh.until(lambda: len(mesh.gateway.of(RequestAccepted)) == 2)
    for _ in range(2):
        await mesh.gateway.send(CancelRequest(RequestId("cancelled"), GATEWAY))
    await mesh.pass_time(1)
    assert endings(await scrape()) == {("cancelled", ""): 1, ("failed", "deadline_exceeded"): 1}


async def test_later_attempt_counts_the_earlier_one_as_moved(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=9)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    mesh.executor.is_working = True
    known = undisturbed_output(PROMPT, 0, 0, 4)
    await mesh.submit("r", max_tokens=9, attempt=2, resumed=(ResumedChoice(array("i", known)),))
    for plan in mesh.executor.of(RunStep)[1:]:
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.detokenizer.closed("r"))
    await mesh.settle()
    page = await scrape()
    assert endings(page) == {("moved", ""): 1, ("completed", ""): 1}
    output, moved, resumed = (
        page.value(f"shoal_scheduler_output_tokens{what}_total") for what in ("", "_moved", "_resumed")
    )
    assert resumed == 4
    assert moved >= 1
    assert output + resumed - moved == 9, "what the request got in the end"


@pytest.mark.parametrize("mesh", [SchedulerConfig(pipeline_depth=4)], indirect=True)
async def test_tokens_that_came_after_the_end_are_unused(mesh: Mesh, scrape: Scrape) -> None:
    third = undisturbed_output(PROMPT, 0, 0, 3)[-1]
    await run_to_the_end(mesh, "r", max_tokens=50, end_token_ids=(third,))
    await mesh.until(lambda: mesh.service.status().num_running == 0)
    await mesh.settle()
    page = await scrape()
    sampled = sum(len(plan.plan.sampled_rows) for plan in mesh.executor.of(RunStep))
    output = page.value("shoal_scheduler_output_tokens_total")
    assert output == len(mesh.detokenizer.tokens("r")) < sampled
    assert page.value("shoal_scheduler_output_tokens_unused_total") == sampled - output


async def run_plan(mesh: Mesh, number: int) -> None:
    """Have an executor that does not work by itself run one plan."""
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) > number)
    await mesh.executor.run(mesh.executor.of(RunStep)[number])
    await mesh.settle()


async def stop_after(mesh: Mesh, num_tokens: int, name: str = "r", index: int = 0) -> None:
    await mesh.detokenizer.send(StopStringFound(RequestId(name), index, num_tokens))
    await mesh.settle()


async def test_what_is_sampled_after_a_stop_string_is_cut_once(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=50)
    for number in range(6):
        await run_plan(mesh, number)
    num_before = len(mesh.detokenizer.tokens("r"))
    assert num_before > 2
    for _ in range(3):
        await stop_after(mesh, 2)
    (closed,) = mesh.detokenizer.closed("r")
    assert closed.usage.num_output_tokens == (2,)
    page = await scrape()
    assert page.value("shoal_scheduler_output_tokens_cut_total") == num_before - 2
    assert page.value("shoal_scheduler_output_tokens_total") == num_before


async def test_stop_string_found_after_the_end_corrects_what_is_kept(mesh: Mesh, scrape: Scrape) -> None:
    await run_to_the_end(mesh, "r", max_tokens=6, client=b"x")
    for num_tokens in (4, 4, 9, 0, -1):
        await stop_after(mesh, num_tokens)
    await stop_after(mesh, 4, index=7)
    await stop_after(mesh, 4, name="unknown")
    assert (await scrape()).value("shoal_scheduler_output_tokens_cut_total") == 2
    mesh.detokenizer.received.clear()
    await mesh.gateway.send(AdoptRequest("q", RequestId("r"), "", GATEWAY))
    await mesh.until(lambda: mesh.detokenizer.closed("r"))
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 4)
    (closed,) = mesh.detokenizer.closed("r")
    assert closed.usage.num_output_tokens == (4,)
    (adopted,) = mesh.gateway.of(RequestAdopted)
    assert adopted.num_output_tokens == (4,)


async def test_stop_string_of_a_choice_that_ended_by_itself_is_taken_off_too(mesh: Mesh, scrape: Scrape) -> None:
    first_ends = undisturbed_output(PROMPT, 0, 0, 4)
    others = undisturbed_output(PROMPT, 0, 1, 8)
    end = next(token for token in first_ends[1:] if token not in others)
    num_first = first_ends.index(end) + 1
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=8, num_choices=2, end_token_ids=(end,))
    number = 0
    while not any(entry.index == 0 and entry.finish_reason for entry in mesh.detokenizer.entries("r")):
        await run_plan(mesh, number)
        number += 1
    await stop_after(mesh, 1)
    await stop_after(mesh, 1)
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep)[number:]:
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.detokenizer.closed("r"))
    await mesh.settle()
    (closed,) = mesh.detokenizer.closed("r")
    assert closed.usage.num_output_tokens == (1, 8)
    assert (await scrape()).value("shoal_scheduler_output_tokens_cut_total") == num_first - 1


async def test_what_is_said_again_is_counted_by_who_asked(mesh: Mesh, scrape: Scrape) -> None:
    await run_to_the_end(mesh, "r", client=b"x")
    await mesh.detokenizer.send(ReplayLog(RequestId("r"), DETOKENIZER))
    await mesh.detokenizer.send(ReplayLog(RequestId("r"), InstanceId("detokenizer-9")))
    await mesh.gateway.send(ReplayRequest(RequestId("r"), GATEWAY, 1, (0,)))
    await mesh.settle()
    mesh.clock.advance(1)
    await mesh.gateway.send(AdoptRequest("q", RequestId("r"), "", GATEWAY))
    await mesh.settle()
    assert (await scrape()).by("shoal_scheduler_replays_total", "asker") == {
        "detokenizer": 1,
        "gateway": 1,
        "adoption": 1,
    }


async def test_plans_that_are_sent_again_are_counted_apart(mesh: Mesh, scrape: Scrape) -> None:
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.executor.send(StepsMissing(EXECUTOR, mesh.executor.epoch, 2))
    await mesh.settle()
    page = await scrape()
    assert page.value("shoal_scheduler_plans_resent_total") == 1
    assert page.value("shoal_scheduler_steps_total", **OF) == 2
