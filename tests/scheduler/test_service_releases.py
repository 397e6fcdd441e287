"""What no executor here can go on with is released to another scheduler, and kept until it goes on there."""

import pytest

from shared.messages import (
    CancelRequest,
    DetachExecutor,
    Outcome,
    ReplayRequest,
    RequestAdopted,
    RequestRefused,
    RequestReleased,
    RequestUnknown,
    ResumedChoice,
    RunStep,
    int32s,
)
from tests.scheduler.harness import GATEWAY, SCHEDULER, GatewayPeer, Mesh
from tests.scheduler.one_request import (
    ADOPTED,
    OTHER,
    RESUMABLE,
    R,
    adopt,
    announce_another_scheduler,
    begin,
    lose_gateway,
    output,
    release,
    releases,
    tell,
)


async def pass_time_of_all(mesh: Mesh, seconds: float, *gateways: GatewayPeer) -> None:
    """Let time pass; the other scheduler, the detokenizer and these gateways live on."""
    for _ in range(int(2 * seconds)):
        await mesh.detokenizer.announce()
        for gateway in gateways:
            await gateway.announce()
        await announce_another_scheduler(mesh, "model")
        await mesh.pass_time(0.5)


async def test_what_no_executor_here_can_go_on_with_is_for_a_scheduler_that_has_one(mesh: Mesh) -> None:
    await begin(mesh)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh)
    await mesh.pass_time(0.25)
    assert mesh.gateway.of(RequestReleased) == [], "the other one has none either"
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]
    assert mesh.detokenizer.closed() == [], "it has not ended"


async def test_what_is_released_is_kept_until_it_goes_on_elsewhere(mesh: Mesh) -> None:
    await release(mesh)
    await pass_time_of_all(mesh, 60.0, mesh.gateway)
    assert len(mesh.gateway.of(RequestReleased)) > 60, "each may be lost"
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2], "its gateway takes along what there is"
    assert not mesh.service.is_idle()
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    assert mesh.service.is_idle()
    assert mesh.detokenizer.closed() == [], "nobody is told of an end"
    num_told = len(mesh.gateway.of(RequestReleased))
    await pass_time_of_all(mesh, 2.0, mesh.gateway)
    assert len(mesh.gateway.of(RequestReleased)) == num_told
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert mesh.gateway.of(RequestUnknown) == [RequestUnknown(R, SCHEDULER, 1)]


async def test_a_released_request_survives_its_gateway_and_is_adopted_with_its_output(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await release(mesh, timeout_ms=60_000, **RESUMABLE)
    await lose_gateway(mesh)
    await pass_time_of_all(mesh, 20.0)
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.num_output_tokens, adopted.has_ended) == ((2,), False)
    assert adopted.submission.timeout_ms == pytest.approx(39_750, abs=500)
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await mesh.pass_time(0.25)
    assert other.of(RequestReleased) == [], "what there is needs a moment to arrive there"
    await mesh.pass_time(0.25)
    assert releases(other) == [(R, SCHEDULER, ADOPTED)]
    await tell(mesh, CancelRequest(R, OTHER, ADOPTED, goes_on=True))
    assert mesh.service.is_idle()
    await other.transport.close()


async def test_nothing_computes_a_released_request_when_an_executor_comes(mesh: Mesh) -> None:
    await release(mesh)
    mesh.executor.restart()
    await mesh.executor.announce()
    await mesh.until(lambda: mesh.service.models() == ("model",))
    num_plans = len(mesh.executor.of(RunStep))
    await mesh.pass_time(1.0)
    assert len(mesh.executor.of(RunStep)) == num_plans
    mesh.executor.is_working = True
    await mesh.submit("r", attempt=2, resumed=(ResumedChoice(int32s(output()[:2])),))
    await mesh.until(mesh.detokenizer.closed)
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [2]
    assert mesh.detokenizer.tokens("r") == output()
    assert mesh.service.is_idle()
    assert not mesh.service._requests._releases


async def test_a_refused_attempt_does_not_cost_the_earlier_one_that_is_kept(mesh: Mesh) -> None:
    await release(mesh, **RESUMABLE)
    await mesh.submit("r", attempt=2, **RESUMABLE)
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    assert mesh.service.status().num_open_requests == 1


async def test_a_released_request_that_is_cancelled_ends(mesh: Mesh) -> None:
    await release(mesh)
    await tell(mesh, CancelRequest(R, GATEWAY, 1))
    assert [(closed.outcome, closed.usage.num_output_tokens) for closed in mesh.detokenizer.closed()] == [
        (Outcome.CANCELLED, (2,))
    ]
    assert mesh.service.is_idle()
    assert not mesh.service._requests._releases


async def test_the_time_of_a_released_request_runs_out(mesh: Mesh) -> None:
    await release(mesh, timeout_ms=2000)
    await pass_time_of_all(mesh, 2.0, mesh.gateway)
    (closed,) = mesh.detokenizer.closed()
    assert closed.error is not None
    assert closed.error.code == "deadline_exceeded"
    assert mesh.service.is_idle()


async def test_a_released_request_that_nobody_comes_for_is_given_up_after_all_others(mesh: Mesh) -> None:
    """If it goes on elsewhere, without a gateway too, then that scheduler tells its end first."""
    await release(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await pass_time_of_all(mesh, 34.0)
    assert mesh.service.status().num_orphaned_requests == 1
    await pass_time_of_all(mesh, 2.0)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    assert mesh.service.is_idle()


async def test_what_has_no_gateway_waits_for_one_before_it_is_released(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.5)
    assert mesh.service.status().num_open_requests == 1
    assert mesh.gateway.of(RequestReleased) == []
    await tell(mesh, adopt())
    await mesh.pass_time(0.25)
    assert releases(other) == [(R, SCHEDULER, ADOPTED)]
    await other.transport.close()


async def test_a_draining_scheduler_lets_its_executors_go_if_another_scheduler_is_there(mesh: Mesh) -> None:
    await begin(mesh)
    await announce_another_scheduler(mesh)
    mesh.service.drain(60)
    await mesh.pass_time(0.25)
    assert mesh.executor.of(DetachExecutor) == [DetachExecutor(SCHEDULER, 1)]
    assert not mesh.service.is_idle()
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]
    assert not mesh.service.is_idle(), "it stays until the request is known to go on"
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    assert mesh.service.is_idle()
