"""Gateways that are gone or silent: how long their requests go on without them."""

from shared.messages import Outcome
from tests.scheduler.harness import SCHEDULER, Mesh
from tests.scheduler.one_request import RESUMABLE, begin, go_on, keep_alive, lose_gateway


async def test_a_resumable_request_outlives_its_gateway_for_a_while(mesh: Mesh) -> None:
    await begin(mesh, **RESUMABLE)
    await lose_gateway(mesh)
    await keep_alive(mesh, 29.0)
    status = mesh.service.status()
    assert (status.num_open_requests, status.num_orphaned_requests, status.num_running) == (1, 1, 1)
    await keep_alive(mesh, 2.0)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks


async def test_a_gateway_that_only_slept_keeps_its_requests(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await begin(mesh, **RESUMABLE)
    await keep_alive(mesh, 20.0)
    assert mesh.service.status().num_orphaned_requests == 1
    await mesh.gateway.announce()
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_orphaned_requests == 0
    await go_on(mesh)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]


async def test_without_the_broker_nobody_is_given_up(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await begin(mesh)
    await mesh.settle()
    mesh.transport._is_connected = False
    await mesh.pass_time(30.0)
    assert mesh.service.status().num_open_requests == 1
    assert len(mesh.service.status().executors) == 1
    mesh.transport._is_connected = True
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.announce(**({"held_by": SCHEDULER} if peer is mesh.executor else {}))
    await mesh.settle()
    await mesh.pass_time(0.5)
    await go_on(mesh)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.COMPLETED]
