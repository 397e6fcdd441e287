"""What a gateway or a detokenizer misses of a request is said again, all of it."""

from shared.ids import InstanceId, RequestId
from shared.messages import ReplayLog, ReplayRequest, RequestUnknown, RunStep, StopStringFound
from tests.scheduler.harness import DETOKENIZER, GATEWAY, SCHEDULER, DetokenizerPeer, Mesh
from tests.scheduler.one_request import RESUMABLE, R, adopt, begin, go_on, output, tell


async def test_a_gateway_that_has_everything_is_told_nothing(mesh: Mesh) -> None:
    await begin(mesh)
    num_messages = len(mesh.detokenizer.received)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (2,)))
    assert len(mesh.detokenizer.received) == num_messages


async def test_a_gateway_that_misses_something_is_told_everything_again(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (1,)))
    first, again = mesh.detokenizer.opened("r")
    assert (first.attempt, again.attempt) == (1, 1)
    assert again.replay > first.replay
    entry = mesh.detokenizer.entries("r")[-1]
    assert (entry.offset, list(entry.token_ids)) == (0, output()[:2])
    await go_on(mesh)
    assert mesh.detokenizer.tokens("r") == output()
    assert len(mesh.detokenizer.closed()) == 1


async def test_a_flood_of_questions_is_answered_once(mesh: Mesh) -> None:
    await begin(mesh)
    mesh.clock.advance(1.0)
    for _ in range(10):
        await mesh.gateway.send(ReplayRequest(R, GATEWAY, 1, (0,)))
    await mesh.settle()
    assert len(mesh.detokenizer.opened("r")) == 2
    mesh.clock.advance(0.5)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (0,)))
    assert len(mesh.detokenizer.opened("r")) == 3


async def test_the_end_is_told_again_as_long_as_it_is_kept(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert len(mesh.detokenizer.closed()) == 2
    assert mesh.detokenizer.closed()[0] == mesh.detokenizer.closed()[1]
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()
    assert mesh.service.status().num_retained_requests == 1
    await mesh.pass_time(301.0)
    assert mesh.service.status().num_retained_requests == 0
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert mesh.gateway.of(RequestUnknown) == [RequestUnknown(R, SCHEDULER, 1)]


async def test_the_end_is_told_through_another_detokenizer_if_the_first_is_gone(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    second = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await second.start()
    await second.announce()
    await mesh.detokenizer.announce(is_leaving=True)
    await mesh.settle()
    await tell(mesh, ReplayRequest(R, GATEWAY, 1, (5,)))
    assert second.tokens("r") == output()
    assert len(second.closed()) == 1
    assert len(mesh.detokenizer.closed()) == 1
    await second.transport.close()


async def test_who_asks_for_what_is_not_there_is_told_so(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayRequest(RequestId("x"), GATEWAY, 1, (0,)))
    await tell(mesh, ReplayRequest(R, GATEWAY, 2, (0,)))
    unknown = [RequestUnknown(RequestId("x"), SCHEDULER, 1), RequestUnknown(R, SCHEDULER, 2)]
    assert mesh.gateway.of(RequestUnknown) == unknown, "a later attempt never arrived here"


async def test_a_detokenizer_that_missed_something_gets_the_log_again(mesh: Mesh) -> None:
    await begin(mesh)
    await tell(mesh, ReplayLog(R, DETOKENIZER))
    first, again = mesh.detokenizer.opened("r")
    assert again == first, "to fill a gap it need not begin again"
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()[:2]
    await go_on(mesh)
    await tell(mesh, ReplayLog(R, DETOKENIZER))
    assert len(mesh.detokenizer.closed()) == 2
    assert list(mesh.detokenizer.entries("r")[-1].token_ids) == output()


async def test_a_detokenizer_that_does_not_have_the_request_any_more_gets_nothing(mesh: Mesh) -> None:
    await begin(mesh)
    other = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await other.start()
    await tell(mesh, ReplayLog(R, other.instance_id))
    await tell(mesh, ReplayLog(RequestId("x"), other.instance_id))
    assert other.received == []
    await other.transport.close()


async def test_tokens_that_wait_to_be_sent_do_not_come_before_the_log_that_is_sent_again(mesh: Mesh) -> None:
    await begin(mesh)
    plan = mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run]
    mesh.service._requests.handle(ReplayRequest(R, GATEWAY, 1, (0,)), 100.0)
    await mesh.executor.run(plan)
    mesh.service._requests.handle(ReplayRequest(R, GATEWAY, 1, (0,)), 200.0)
    await mesh.settle()
    batch = mesh.detokenizer.received[-1]
    assert [(entry.offset, list(entry.token_ids)) for entry in batch.tokens] in (
        [(0, output()[:2]), (2, output()[2:3])],
        [(0, output()[:3])],
    )
    assert len(batch.opened) == 1


async def test_a_stop_string_that_a_replay_finds_late_still_ends_the_choice(mesh: Mesh) -> None:
    await begin(mesh, num_tokens=3, **RESUMABLE)
    await tell(mesh, adopt())
    await mesh.detokenizer.send(StopStringFound(R, 0, 2))
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (2,)
