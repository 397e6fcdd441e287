"""The scheduler service: a request whose time is over fails, wherever it is, and gives back what it held."""

import pytest

from services.scheduler.config import SchedulerConfig
from shared.errors import DeadlineExceeded
from shared.messages import ErrorInfo, Outcome, RunStep
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import PROMPT, SCHEDULER, Mesh

LATE = ErrorInfo.of(DeadlineExceeded("the request's timeout_ms is over"))


async def pass_time_with_beats(mesh: Mesh, seconds: float) -> None:
    """Let time pass in which nobody seems dead."""
    for _ in range(int(seconds / 0.5)):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.5)


async def test_a_request_that_is_still_queued_when_its_time_is_over_fails_and_never_runs(mesh: Mesh) -> None:
    mesh.executor.capacity = make_capacity(max_slots=1)
    mesh.executor.restart()
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("first", max_tokens=3)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.submit("queued", timeout_ms=2000)
    await pass_time_with_beats(mesh, 1.5)
    assert mesh.detokenizer.closed() == []
    await pass_time_with_beats(mesh, 1.0)
    (closed,) = mesh.detokenizer.closed()
    assert (closed.request_id, closed.outcome, closed.error) == ("queued", Outcome.FAILED, LATE)
    assert closed.usage.num_output_tokens == (0,)
    assert mesh.service.status().num_waiting == 0
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.detokenizer.closed("first"))
    assert mesh.detokenizer.tokens("first") == undisturbed_output(PROMPT, 0, 0, 3)
    assert {each.request_id for plan in mesh.executor.of(RunStep) for each in plan.plan.assigned} == {"first"}


@pytest.mark.parametrize("mesh", [SchedulerConfig(pipeline_depth=1)], indirect=True)
async def test_a_running_request_whose_time_is_over_fails_with_the_tokens_it_has_and_frees_its_blocks(
    mesh: Mesh,
) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=50, timeout_ms=1000)
    for number in range(3):
        await mesh.until(lambda number=number: len(mesh.executor.of(RunStep)) == number + 1)  # type: ignore[misc]
        await mesh.executor.run(mesh.executor.of(RunStep)[number])
    await mesh.until(lambda: len(mesh.detokenizer.tokens("r")) == 3)
    await pass_time_with_beats(mesh, 1.5)
    (closed,) = mesh.detokenizer.closed()
    assert (closed.outcome, closed.error) == (Outcome.FAILED, LATE)
    assert closed.usage.num_output_tokens == (3,)
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks
    await mesh.executor.run(mesh.executor.of(RunStep)[3])  # the step that was on its way changes nothing
    await mesh.settle()
    assert len(mesh.detokenizer.closed()) == 1
    assert mesh.service.is_idle()


async def test_a_request_that_ends_in_time_is_left_alone(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r", max_tokens=3, timeout_ms=500)
    await mesh.until(mesh.detokenizer.closed)
    await pass_time_with_beats(mesh, 2.0)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]
