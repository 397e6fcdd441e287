"""A request whose client has come back to another gateway is adopted by it."""

from typing import Any

import pytest
from msgspec.structs import replace

from shared import attempts
from shared.ids import InstanceId, RequestId
from shared.messages import CancelRequest, Outcome, ReplayRequest, RequestAdopted, RequestFound, RequestMoved
from tests.scheduler.harness import GATEWAY, PROMPT, SCHEDULER, GatewayPeer, Mesh
from tests.scheduler.one_request import (
    ADOPTED,
    OTHER,
    RESUMABLE,
    R,
    adopt,
    ask_all,
    begin,
    find,
    go_on,
    keep_alive,
    lose_gateway,
    output,
    tell,
)


async def test_another_gateway_adopts_a_request_that_runs(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await other.announce()
    await begin(mesh, timeout_ms=60_000, **RESUMABLE)
    mesh.clock.advance(1.0)
    await lose_gateway(mesh)
    await ask_all(mesh, find())
    assert other.received == [RequestFound("query", R, SCHEDULER, 1)]
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.query_id, adopted.scheduler_id, adopted.has_ended) == ("query", SCHEDULER, False)
    assert adopted.num_output_tokens == (2,)
    submission = adopted.submission
    assert (submission.gateway_id, submission.timeout_ms, submission.client) == (OTHER, 59_000, b"chat")
    assert submission.attempt == ADOPTED
    assert submission.prompt_token_ids.tolist() == PROMPT
    opened = mesh.detokenizer.opened("r")[-1]
    assert (opened.gateway_id, opened.attempt) == (OTHER, ADOPTED)
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_orphaned_requests == 0
    await go_on(mesh)
    assert [(closed.outcome, closed.attempt) for closed in mesh.detokenizer.closed()] == [(Outcome.COMPLETED, ADOPTED)]
    await other.transport.close()


async def test_looking_for_a_request_moves_nothing(mesh: Mesh) -> None:
    """A client may have asked one gateway and gone to another one meanwhile: late questions take nothing away."""
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    for _ in range(3):
        await ask_all(mesh, find())
    assert other.of(RequestFound) == [RequestFound("query", R, SCHEDULER, 1)] * 3
    assert mesh.gateway.of(RequestMoved) == []
    await go_on(mesh)
    assert [opened.gateway_id for opened in mesh.detokenizer.opened("r")] == [GATEWAY]
    await other.transport.close()


async def test_a_late_adoption_takes_nothing_from_the_gateway_that_was_faster(mesh: Mesh) -> None:
    late, served = GatewayPeer(mesh.broker, OTHER), GatewayPeer(mesh.broker, InstanceId("gateway-3"))
    await late.start()
    await served.start()
    await begin(mesh, **RESUMABLE)
    await ask_all(mesh, find())
    await ask_all(mesh, find(gateway_id=served.instance_id))
    await tell(mesh, adopt(gateway_id=served.instance_id))
    now = attempts.after_adoption(1, served.instance_id)
    await tell(mesh, adopt())
    assert late.received == [RequestFound("query", R, SCHEDULER, 1), RequestFound("query", R, SCHEDULER, now)]
    assert served.of(RequestMoved) == []
    assert mesh.detokenizer.opened("r")[-1].gateway_id == served.instance_id
    await tell(mesh, adopt(now))
    assert len(late.of(RequestAdopted)) == 1, "if its client still waits, it is the newer one"
    assert served.of(RequestMoved) == [RequestMoved(R, SCHEDULER, attempts.after_adoption(now, OTHER))]
    for peer in (late, served):
        await peer.transport.close()


async def test_an_adoption_whose_answer_was_lost_is_made_again(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await tell(mesh, adopt())
    await ask_all(mesh, find())
    assert other.of(RequestFound)[-1].attempt == ADOPTED
    await tell(mesh, adopt(ADOPTED))
    assert len(other.of(RequestAdopted)) == 2
    assert other.of(RequestMoved) == []
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2], "its output is said again, too"
    assert mesh.detokenizer.opened("r")[-1].attempt == other.of(RequestAdopted)[-1].submission.attempt
    await other.transport.close()


async def test_a_gateway_whose_request_was_adopted_is_told_and_not_obeyed_any_more(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **RESUMABLE)
    await tell(mesh, adopt())
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)]
    await tell(mesh, CancelRequest(R, GATEWAY, 1))
    await tell(mesh, CancelRequest(R, GATEWAY, 1, goes_on=True))
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)] * 4, "should it have missed the first"
    await mesh.submit("r", attempt=2, **RESUMABLE)
    await mesh.settle()
    assert mesh.gateway.of(RequestMoved) == [RequestMoved(R, SCHEDULER, ADOPTED)] * 5, "nor a later attempt of its own"
    await lose_gateway(mesh)
    await keep_alive(mesh, 1.0)
    assert mesh.service.status().num_open_requests == 1
    await tell(mesh, CancelRequest(R, OTHER, ADOPTED))
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    await other.transport.close()


async def test_an_ended_request_is_adopted_with_its_output_and_its_end(mesh: Mesh) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await mesh.ready()
    await mesh.submit("r", **RESUMABLE)
    await mesh.until(mesh.detokenizer.closed)
    await tell(mesh, adopt())
    (adopted,) = other.of(RequestAdopted)
    assert (adopted.has_ended, adopted.num_output_tokens) == (True, (5,))
    assert mesh.detokenizer.opened("r")[-1].gateway_id == OTHER
    assert [closed.attempt for closed in mesh.detokenizer.closed()] == [1, ADOPTED]
    await other.transport.close()


@pytest.mark.parametrize(
    ("fields", "owner", "request_id"),
    [(RESUMABLE, "somebody else", "r"), (RESUMABLE, "me", "another"), ({"owner": "me"}, "me", "r")],
    ids=["another owner", "another request", "not resumable"],
)
async def test_nobody_gets_what_is_not_his(mesh: Mesh, fields: dict[str, Any], owner: str, request_id: str) -> None:
    other = GatewayPeer(mesh.broker, OTHER)
    await other.start()
    await begin(mesh, **fields)
    await ask_all(mesh, find(owner, request_id))
    await tell(mesh, replace(adopt(), owner=owner, request_id=RequestId(request_id)))
    assert other.received == []
    assert [opened.gateway_id for opened in mesh.detokenizer.opened("r")] == [GATEWAY]
    await other.transport.close()
