"""The scheduler service: requests from submission to their end."""

import pytest

from services.scheduler.config import SchedulerConfig
from shared.ids import RequestId, Service
from shared.messages import (
    CancelRequest,
    DetachExecutor,
    FinishReason,
    GatewayStatus,
    Outcome,
    RequestAccepted,
    RequestRefused,
    RunStep,
    StopStringFound,
)
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import GATEWAY, PROMPT, SCHEDULER, Mesh

configured = pytest.mark.parametrize(
    "mesh", [SchedulerConfig(pipeline_depth=1), SchedulerConfig(pipeline_depth=2)], indirect=True, ids=["1", "2"]
)


@configured
async def test_a_request_is_accepted_computed_delivered_and_closed_once(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.gateway.received == [RequestAccepted(RequestId("r"), SCHEDULER, len(PROMPT))]
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 5)
    (closed,) = mesh.detokenizer.closed()
    assert closed.outcome is Outcome.COMPLETED
    assert closed.usage.num_output_tokens == (5,)
    assert mesh.service.is_idle()


async def test_without_max_tokens_the_executor_room_is_the_limit(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r", max_tokens=None)
    await mesh.until(mesh.detokenizer.closed)
    limit = mesh.executor.capacity.num_blocks * mesh.executor.capacity.block_size
    assert len(PROMPT) + len(mesh.detokenizer.tokens("r")) == limit


async def test_a_repeated_submission_is_acknowledged_again_and_run_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.gateway.of(RequestAccepted)) == 2)
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(mesh.detokenizer.closed)
    await mesh.submit("r")
    await mesh.settle()
    assert len(mesh.gateway.of(RequestAccepted)) == 3
    assert len(mesh.detokenizer.closed()) == 1, "a repetition after the end starts nothing"


async def test_cancel_stops_a_request_and_closes_it_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    for _ in range(2):
        await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.until(mesh.detokenizer.closed)
    await mesh.settle()
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks


async def test_a_cancel_that_comes_before_its_request_still_cancels_it(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    assert mesh.executor.of(RunStep) == []


async def test_a_cancel_after_the_end_does_nothing(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    assert len(mesh.detokenizer.closed()) == 1


async def test_a_stop_string_ends_the_choice_where_the_text_did(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=50)
    for _ in range(4):
        await mesh.until(lambda: len(mesh.executor.of(RunStep)) > mesh.executor.fake.num_rows_run)
        await mesh.executor.run(mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run])
    await mesh.until(lambda: len(mesh.detokenizer.tokens("r")) == 4)
    await mesh.detokenizer.send(StopStringFound(RequestId("r"), 0, 2))
    await mesh.until(mesh.detokenizer.closed)
    last = mesh.detokenizer.entries("r")[-1]
    assert (last.offset, len(last.token_ids), last.finish_reason) == (2, 0, FinishReason.STOP)
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (2,)


async def test_requests_of_a_gateway_that_is_gone_are_cancelled(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"))
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"), is_leaving=True)
    await mesh.settle()
    await mesh.pass_time(0.25)
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.service.is_idle()


async def test_status_counts_what_happened(mesh: Mesh) -> None:
    await mesh.ready()
    for number in (1, 2):
        await mesh.submit(f"r{number}", max_tokens=3)
        await mesh.settle()
    assert len(mesh.detokenizer.closed()) == 2
    status = mesh.service.status()
    assert (status.num_waiting, status.num_running) == (0, 0)
    assert status.num_prompt_tokens == 2 * len(PROMPT)
    assert status.num_cached_tokens == 8
    assert status.num_output_tokens == 6


async def test_timing_tells_of_the_queue_the_first_token_and_the_whole(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=2)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    mesh.clock.advance(1.0)
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    mesh.clock.advance(0.5)
    await mesh.executor.run(mesh.executor.of(RunStep)[1])
    await mesh.until(mesh.detokenizer.closed)
    timing = mesh.detokenizer.closed()[0].timing
    assert (timing.queue_s, timing.first_token_s, timing.total_s) == (0.0, 1.0, 1.5)


async def test_leaving_lets_the_executor_go(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.service.on_stop()
    await mesh.until(lambda: mesh.executor.of(DetachExecutor))
    assert mesh.executor.of(DetachExecutor) == [DetachExecutor(SCHEDULER, 1)]


async def test_a_draining_scheduler_refuses_new_requests_and_finishes_the_others(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("old")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    mesh.service.drain(60)
    await mesh.submit("new")
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    assert mesh.gateway.of(RequestRefused)[0].error.status == 503
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.detokenizer.closed("old"))
