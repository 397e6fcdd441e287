"""Requests that nobody reads: found here again, kept for a while, cancelled."""

import pytest

from shared.errors import NotFound
from shared.messages import Outcome
from tests.gateway.elsewhere import CLIENT, open_request
from tests.gateway.harness import Harness, running_gateway


async def test_a_request_that_is_open_here_is_found_here(harness: Harness) -> None:
    stream, request = await open_request(harness)
    await request.say("ab", num_tokens=2)
    await harness.settle()
    found = await harness.mesh.resume(stream.request_id, "me")
    assert found.stream is stream
    assert (found.client, found.num_tokens) == (CLIENT, (2,))
    assert harness.fake.searches.empty()


@pytest.mark.parametrize(("owner", "client"), [("somebody else", CLIENT), ("me", b"")])
async def test_what_is_not_ones_own_or_not_resumable_is_not_found(harness: Harness, owner: str, client: bytes) -> None:
    stream, _ = await open_request(harness, client)
    with pytest.raises(NotFound):
        await harness.mesh.resume(stream.request_id, owner)
    assert harness.fake.searches.empty(), "nobody else has it either"


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
