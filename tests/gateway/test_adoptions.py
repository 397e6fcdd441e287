"""Requests that outlive their connection or their gateway: found again, kept for a while, let go."""

import asyncio
from typing import Any

import pytest

from services.gateway.chat import chat_draft
from services.gateway.config import GatewayConfig
from services.gateway.keys import Caller
from services.gateway.mesh import Resumed
from services.gateway.streams import Stream
from shared.errors import NotFound, Overloaded, Unavailable
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    FinishReason,
    Outcome,
    RequestAdopted,
    RequestMoved,
    SubmitRequest,
    SubmitTokens,
    TextOptions,
    TokenPrompt,
    int32s,
)
from shared.sampling import SamplingParams
from tests.gateway.fake_mesh import MODEL, FakeRequest, logprobs_of
from tests.gateway.harness import CHAT, Harness, running_gateway

ME, CLIENT = Caller("tenant", "me"), b"how to tell it"
R = RequestId("req-elsewhere")
OTHER = InstanceId("scheduler-bbbbbbbb")


async def open_request(harness: Harness, client: bytes = CLIENT, **fields: Any) -> tuple[Stream, FakeRequest]:
    """A request that a client reads here, and the mesh's side of it."""
    streams = harness.mesh.admit(chat_draft(CHAT | fields), ME, client=client)
    await harness.mesh.submit(streams)
    request = await harness.fake.next_request()
    await request.accept()
    await harness.settle()
    return streams[0], request


def adopted(harness: Harness, query_id: str, *, attempt: int = 1, has_ended: bool = False) -> RequestAdopted:
    """What the scheduler answers that has the request."""
    submission = SubmitTokens(
        request_id=R,
        gateway_id=harness.gateway.identity.instance_id,
        model=MODEL,
        tenant="tenant",
        prompt_token_ids=int32s([1, 2, 3]),
        sampling=SamplingParams(seed=1),
        text=TextOptions(),
        num_choices=1,
        max_tokens=10,
        attempt=attempt,
        owner="me",
        client=CLIENT,
    )
    scheduler_id = harness.fake.scheduler_id if attempt == 1 else OTHER
    return RequestAdopted(query_id, scheduler_id, submission, (2,), has_ended)


def mesh_side(harness: Harness, answer: RequestAdopted) -> FakeRequest:
    """The request as the mesh has it that gave this answer."""
    given = answer.submission
    message = SubmitRequest(
        request_id=given.request_id,
        gateway_id=given.gateway_id,
        scheduler_id=answer.scheduler_id,
        model=given.model,
        tenant=given.tenant,
        prompt=TokenPrompt(given.prompt_token_ids),
        sampling=given.sampling,
        attempt=given.attempt,
    )
    return FakeRequest(harness.fake, message)


async def adopt(harness: Harness, **fields: Any) -> tuple[Resumed, FakeRequest]:
    """A request of another gateway, found for a client, and the mesh's side of it."""
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    asked = await harness.fake.next_adoption()
    assert (asked.request_id, asked.owner) == (R, "me")
    assert asked.gateway_id == harness.gateway.identity.instance_id
    answer = adopted(harness, asked.query_id, **fields)
    await harness.fake.send_to(asked.gateway_id, answer)
    return await looking, mesh_side(harness, answer)


# Here.


async def test_a_request_that_is_open_here_is_found_here(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await request.say("ab", num_tokens=2)
    await harness.settle()
    found = await harness.mesh.resume(stream.request_id, "me")
    assert found.stream is stream
    assert (found.client, found.num_tokens) == (CLIENT, (2,))
    assert harness.fake.adoptions.empty()


@pytest.mark.parametrize(("owner", "client"), [("somebody else", CLIENT), ("me", b"")])
async def test_what_is_not_ones_own_or_not_resumable_is_not_found(harness: Harness, owner: str, client: bytes) -> None:
    stream, _ = await open_request(harness, client)
    with pytest.raises(NotFound):
        await harness.mesh.resume(stream.request_id, owner)
    assert harness.fake.adoptions.empty(), "nobody else has it either"


async def test_a_detached_request_goes_on_and_is_cancelled_when_nobody_comes() -> None:
    async with running_gateway(resume_grace_s=10.0) as harness:
        stream, request = await open_request(harness)
        await harness.mesh.detach([stream])
        await request.say("a")
        await harness.advance(9.5)
        assert harness.gateway.status().num_detached_requests == 1
        assert harness.fake.cancellations.empty()
        await harness.advance(0.5)
        assert await harness.fake.next_cancellation() == stream.request_id
        await request.close(Outcome.CANCELLED)
        await harness.nothing_is_left()
        assert harness.gateway.status().num_detached_requests == 0


async def test_a_request_that_somebody_comes_back_for_goes_on(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await harness.mesh.detach([stream])
    await harness.advance(25.0)
    found = await harness.mesh.resume(stream.request_id, "me")
    harness.mesh.attach([found.stream])
    await harness.advance(25.0)
    assert harness.fake.cancellations.empty()
    await request.say("a")
    await request.finish()
    await harness.nothing_is_left()
    assert stream.end is not None
    assert stream.end.outcome is Outcome.COMPLETED


async def test_without_grace_a_detached_request_is_cancelled_at_once() -> None:
    async with running_gateway(resume_grace_s=0.0) as harness:
        stream, _ = await open_request(harness)
        await harness.mesh.detach([stream])
        assert await harness.fake.next_cancellation() == stream.request_id


async def test_detaching_what_has_ended_changes_nothing(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await request.finish()
    await harness.nothing_is_left()
    await harness.mesh.detach([stream])
    harness.mesh.attach([stream])
    await harness.mesh.cancel([stream])
    await harness.advance(60.0)
    assert harness.fake.cancellations.empty()


# From elsewhere.


async def test_a_request_of_another_gateway_is_adopted_with_all_that_was_said(harness: Harness) -> None:
    found, request = await adopt(harness)
    assert (found.client, found.num_tokens) == (CLIENT, (2,))
    assert found.stream.is_accepted
    harness.mesh.attach([found.stream])
    await request.say("ab", num_tokens=2)
    await request.say("c")
    await request.finish()
    await harness.nothing_is_left()
    assert found.stream.choices[0].text == "abc"
    assert found.stream.end is not None
    assert found.stream.end.outcome is Outcome.COMPLETED
    assert harness.mesh.requests.num_ended == {Outcome.COMPLETED: 1}
    assert harness.gateway.status().num_requests == 1


async def test_an_adopted_request_begins_without_a_reader(harness: Harness) -> None:
    found, _ = await adopt(harness)
    await harness.advance(29.0)
    assert harness.fake.cancellations.empty()
    await harness.advance(1.5)
    assert await harness.fake.next_cancellation() == found.stream.request_id


async def test_the_end_of_a_request_that_was_told_elsewhere_is_not_counted_here(harness: Harness) -> None:
    found, request = await adopt(harness, has_ended=True)
    await request.say("ab", num_tokens=2)
    await request.close(Outcome.CANCELLED)
    await harness.nothing_is_left()
    assert found.stream.end is not None
    assert found.stream.end.outcome is Outcome.CANCELLED, "as it ended then"
    assert not harness.mesh.requests.num_ended
    assert harness.gateway.status().num_requests == 0


async def test_an_adopted_request_goes_on_at_another_scheduler_too(harness: Harness) -> None:
    found, request = await adopt(harness)
    harness.mesh.attach([found.stream])
    await request.say("ab", num_tokens=2, logprobs=[logprobs_of("a"), logprobs_of("b")])
    submitted: asyncio.Queue[SubmitTokens] = asyncio.Queue()
    await harness.fake.take_submissions(OTHER, submitted.put_nowait)
    await harness.fake.announce(Service.SCHEDULER, harness.fake.scheduler_id, is_leaving=True)
    message = await asyncio.wait_for(submitted.get(), 5)
    assert (message.attempt, message.prompt_token_ids.tolist(), message.client) == (2, [1, 2, 3], CLIENT)
    assert message.gateway_id == harness.gateway.identity.instance_id
    assert [list(choice.token_ids) for choice in message.resumed] == [[0, 1]]


async def test_of_two_schedulers_that_answer_the_one_with_the_later_attempt_counts(harness: Harness) -> None:
    await harness.fake.add_scheduler(OTHER)
    found, early = await adopt(harness)
    gateway_id = harness.gateway.identity.instance_id
    await harness.fake.send_to(gateway_id, adopted(harness, "the same", attempt=2))
    told = await asyncio.wait_for(harness.fake.cancellations.get(), 5)
    assert (told.request_id, told.attempt) == (R, 1)
    await early.say("x")
    await early.close(Outcome.CANCELLED)
    late = mesh_side(harness, adopted(harness, "", attempt=2))
    await late.say("abc")
    await late.finish()
    await harness.nothing_is_left()
    assert found.stream.choices[0].text == "abc"
    await harness.fake.send_to(gateway_id, adopted(harness, "another", attempt=2))
    await harness.settle()
    await harness.fake.send_to(gateway_id, adopted(harness, "another", attempt=1))
    told = await asyncio.wait_for(harness.fake.cancellations.get(), 5)
    assert told.attempt == 1, "also if it answers last"


async def test_nobody_answers_for_an_unknown_request(harness: Harness) -> None:
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    first = await harness.fake.next_adoption()
    await harness.advance(0.5)
    assert await harness.fake.next_adoption() == first, "the question may have been lost"
    assert not looking.done()
    await harness.advance(0.5)
    with pytest.raises(NotFound):
        await looking
    assert len(harness.mesh.adoptions) == 0


async def test_while_a_scheduler_may_come_back_nobody_says_that_a_request_is_unknown(harness: Harness) -> None:
    harness.fake.silent.add(Service.SCHEDULER)
    await harness.advance(2.0)
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_adoption()
    await harness.advance(1.5)
    with pytest.raises(Unavailable):
        await looking
    harness.fake.silent.clear()
    await harness.advance(GatewayConfig().failover_timeout_s)
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_adoption()
    await harness.advance(1.5)
    with pytest.raises(NotFound):
        await looking


async def test_an_answer_that_nobody_waits_for_any_more_is_cancelled_in_the_end(harness: Harness) -> None:
    await harness.fake.send_to(harness.gateway.identity.instance_id, adopted(harness, "forgotten"))
    await harness.settle()
    await harness.advance(31.0)
    assert await harness.fake.next_cancellation() == R


async def test_a_request_that_its_client_reads_elsewhere_ends_here_without_being_cancelled(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await request.say("a")
    moved = RequestMoved(stream.request_id, harness.fake.scheduler_id)
    for _ in range(2):
        await harness.fake.send_to(harness.gateway.identity.instance_id, moved)
    await harness.settle()
    assert stream.end is not None
    assert stream.end.error is not None
    assert stream.end.error.code == "resumed_elsewhere"
    assert len(harness.mesh.requests) == 0
    assert not harness.mesh.requests.num_ended, "it has not ended"
    await harness.mesh.cancel([stream])
    await harness.mesh.detach([stream])
    await harness.advance(60.0)
    assert harness.fake.cancellations.empty()


async def test_a_stream_of_an_earlier_stay_has_no_say_over_a_request_that_came_back(harness: Harness) -> None:
    found, _ = await adopt(harness)
    moved = RequestMoved(R, harness.fake.scheduler_id)
    await harness.fake.send_to(harness.gateway.identity.instance_id, moved)
    await harness.settle()
    again, request = await adopt(harness)
    harness.mesh.attach([again.stream])
    await harness.mesh.cancel([found.stream])
    await harness.mesh.detach([found.stream])
    await harness.advance(60.0)
    assert harness.fake.cancellations.empty()
    await request.say("ab", finish_reason=FinishReason.STOP)
    await harness.settle()
    assert again.stream.choices[0].text == "ab"


# The gateway itself.


async def test_a_leaving_gateway_lets_go_what_can_be_resumed_and_fails_the_rest(harness: Harness) -> None:
    resumable, _ = await open_request(harness)
    plain, _ = await open_request(harness, b"")
    await harness.mesh.end_all()
    assert resumable.end is None
    assert plain.end is not None
    assert await harness.fake.next_cancellation() == plain.request_id
    await harness.mesh.detach([resumable])
    await harness.advance(60.0)
    while not harness.fake.cancellations.empty():
        assert await harness.fake.next_cancellation() == plain.request_id, "again, since nobody confirms it"


async def test_what_a_leaving_gateway_looks_for_is_not_found(harness: Harness) -> None:
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    await harness.fake.next_adoption()
    await harness.mesh.end_all()
    with pytest.raises(NotFound):
        await looking


async def test_a_gateway_that_drains_or_is_full_resumes_nothing() -> None:
    async with running_gateway(max_open_requests=1) as harness:
        stream, _ = await open_request(harness)
        with pytest.raises(Overloaded):
            await harness.mesh.resume(R, "me")
        assert (await harness.mesh.resume(stream.request_id, "me")).stream is stream
        harness.gateway.drain(10.0)
        with pytest.raises(Unavailable):
            await harness.mesh.resume(stream.request_id, "me")


async def test_without_the_broker_nobody_counts_as_gone(harness: Harness) -> None:
    stream, request = await open_request(harness)
    harness.transport._is_connected = False
    await harness.advance(30.0)
    assert not harness.mesh.requests.num_ended
    harness.transport._is_connected = True
    await harness.advance(3.0)
    assert harness.fake.submissions.empty()
    await request.say("a")
    await request.finish()
    await harness.nothing_is_left()
    assert stream.end is not None
    assert stream.end.outcome is Outcome.COMPLETED
