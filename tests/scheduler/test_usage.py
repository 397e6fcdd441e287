"""What a scheduler writes down of a request whose gateway is lost."""

import asyncio

import pytest

from services.scheduler.usage import UsageRecords
from shared.codec import Decoder
from shared.errors import DeadlineExceeded
from shared.ids import InstanceId, RequestId
from shared.messages import USAGE_LEDGER, CancelRequest, ErrorInfo, Outcome, RequestClosed, Timing, Usage, UsageRecord
from shared.transport.memory import MemoryBroker
from tests.scheduler.harness import GATEWAY, PATIENCE_S, PROMPT, Mesh
from tests.shared.messages.examples import SUBMISSION

REQUEST, SCHEDULER = RequestId("req-1"), InstanceId("scheduler-1")
USAGE = Usage(10, 4, (3, 1))


def test_a_request_that_ended_alone_is_recorded_as_it_ended() -> None:
    written: list[UsageRecord] = []
    records = UsageRecords(SCHEDULER, written.append, lambda: 100.0)
    records.ended_alone(RequestClosed(REQUEST, Outcome.CANCELLED, USAGE), SUBMISSION)
    failed = RequestClosed(REQUEST, Outcome.FAILED, USAGE, Timing(), ErrorInfo.of(DeadlineExceeded("late")))
    records.ended_alone(failed, SUBMISSION, ago_s=2.5)
    assert written == [
        UsageRecord(REQUEST, "acme", "tiny", Outcome.CANCELLED, USAGE, 100.0, SCHEDULER),
        UsageRecord(REQUEST, "acme", "tiny", Outcome.FAILED, USAGE, 97.5, SCHEDULER, "deadline_exceeded"),
    ]


def records(broker: MemoryBroker) -> list[UsageRecord]:
    decoder = Decoder[UsageRecord](UsageRecord)
    return [decoder.decode(payload) for payload in broker.ledgers[USAGE_LEDGER].payloads.values()]


async def recorded(mesh: Mesh) -> list[UsageRecord]:
    await mesh.settle()
    async with asyncio.timeout(PATIENCE_S):
        while mesh.service.status().num_unrecorded:  # noqa: ASYNC110  # the broker sets no event of ours
            await asyncio.sleep(0.001)
    return records(mesh.broker)


async def begin(mesh: Mesh, **fields: object) -> None:
    """A request that runs and goes no further by itself, of a gateway that was heard."""
    await mesh.ready()
    await mesh.gateway.announce()
    mesh.executor.is_working = False
    await mesh.submit("r", **fields)
    await mesh.settle()


async def test_requests_whose_gateway_lives_are_left_to_it(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.gateway.announce()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert await recorded(mesh) == []


async def test_a_request_that_ended_just_before_its_gateway_was_lost_is_recorded(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.gateway.announce()
    await mesh.submit("r", num_choices=2)
    await mesh.until(mesh.detokenizer.closed)
    await mesh.pass_time(2.5)
    (record,) = await recorded(mesh)
    assert (record.request_id, record.tenant, record.outcome) == ("r", "a", Outcome.COMPLETED)
    assert (record.usage.num_prompt_tokens, record.usage.num_output_tokens) == (len(PROMPT), (5, 5))


async def test_a_request_that_ended_long_before_its_gateway_was_lost_is_not_said_again(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.gateway.announce()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    for _ in range(70):
        await mesh.gateway.announce()
        await mesh.pass_time(1.0)
    await mesh.gateway.announce(is_leaving=True)
    assert await recorded(mesh) == []


@pytest.mark.parametrize("goes_on", [False, True])
async def test_what_a_gateway_cancels_that_was_only_silent_is_left_to_it(mesh: Mesh, goes_on: bool) -> None:
    await begin(mesh, client=b"chat")
    for _ in range(10):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    assert mesh.service._requests.orphans.has(GATEWAY)
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY, 1, goes_on=goes_on))
    await mesh.settle()
    assert await recorded(mesh) == []


async def test_a_request_that_cannot_be_resumed_is_recorded_when_its_gateway_is_lost(mesh: Mesh) -> None:
    await begin(mesh)
    await mesh.gateway.announce(is_leaving=True)
    await mesh.pass_time(0.5)
    (record,) = await recorded(mesh)
    assert record.outcome is Outcome.CANCELLED


async def test_an_orphan_is_recorded_once_when_it_is_given_up_and_not_before(mesh: Mesh) -> None:
    await begin(mesh, client=b"chat")
    await mesh.gateway.announce(is_leaving=True)
    await mesh.pass_time(25)
    assert await recorded(mesh) == []
    await mesh.pass_time(10)
    (record,) = await recorded(mesh)
    assert record.outcome is Outcome.CANCELLED


async def test_an_orphan_is_recorded_by_the_scheduler_that_leaves_with_it(mesh: Mesh) -> None:
    await begin(mesh, client=b"chat")
    await mesh.gateway.announce(is_leaving=True)
    await mesh.settle()
    await mesh.service.on_stop()
    (record,) = records(mesh.broker)
    assert (record.request_id, record.outcome) == ("r", Outcome.CANCELLED)


async def test_a_scheduler_that_leaves_records_nothing_of_what_its_gateways_give_to_others(mesh: Mesh) -> None:
    await begin(mesh, client=b"chat")
    await mesh.service.on_stop()
    assert records(mesh.broker) == []
