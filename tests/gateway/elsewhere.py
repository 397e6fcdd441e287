"""A request that is elsewhere in the mesh, and what is said when its client comes back for it."""

import asyncio
from typing import Any

from services.gateway.chat import chat_draft
from services.gateway.keys import Caller
from services.gateway.mesh import Resumed
from services.gateway.streams import Stream
from shared.ids import InstanceId, RequestId
from shared.messages import (
    AdoptRequest,
    Message,
    RequestAdopted,
    RequestFound,
    RequestPast,
    SubmitRequest,
    SubmitTokens,
    TextOptions,
    TokenPrompt,
    int32s,
)
from shared.sampling import SamplingParams
from tests.gateway.fake_mesh import MODEL, FakeRequest
from tests.gateway.harness import CHAT, Harness

ME, CLIENT = Caller("tenant", "me"), b"how to tell it"
R = RequestId("req-elsewhere")


async def open_request(harness: Harness, client: bytes = CLIENT, **fields: Any) -> tuple[Stream, FakeRequest]:
    """A request that a client reads here, and the mesh's side of it."""
    streams = harness.mesh.admit(chat_draft(CHAT | fields), ME, client=client)
    await harness.mesh.submit(streams)
    request = await harness.fake.next_request()
    await request.accept()
    await harness.settle()
    return streams[0], request


def adopted(
    harness: Harness, query_id: str, attempt: int, *, has_ended: bool = False, by: InstanceId | None = None
) -> RequestAdopted:
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
        past=RequestPast(age_s=20.0, queue_s=1.0, first_token_s=2.0, num_cached_tokens=3),
        owner="me",
        client=CLIENT,
    )
    return RequestAdopted(query_id, by or harness.fake.scheduler_id, submission, (2,), has_ended)


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


async def look(harness: Harness) -> tuple[asyncio.Task[Resumed], str]:
    """A client comes back for a request of another gateway: the task that waits for it, and the id of its question."""
    looking = asyncio.create_task(harness.mesh.resume(R, "me"))
    asked = await harness.fake.next_search()
    assert (asked.request_id, asked.owner) == (R, "me")
    assert asked.gateway_id == harness.gateway.identity.instance_id
    return looking, asked.query_id


async def tell(harness: Harness, message: Message) -> None:
    """Say something to the gateway."""
    await harness.fake.send_to(harness.gateway.identity.instance_id, message)
    await harness.settle()


async def find(harness: Harness, query_id: str, attempt: int = 1, by: InstanceId | None = None) -> AdoptRequest:
    """A scheduler has it, and is asked to hand it over."""
    await tell(harness, RequestFound(query_id, R, by or harness.fake.scheduler_id, attempt))
    asked = await harness.fake.next_adoption()
    assert (asked.query_id, asked.request_id, asked.owner, asked.attempt) == (query_id, R, "me", attempt)
    assert asked.next_attempt > attempt
    return asked


async def adopt(harness: Harness, **fields: Any) -> tuple[Resumed, FakeRequest]:
    """A request of another gateway, found for a client, and the mesh's side of it."""
    looking, query_id = await look(harness)
    asked = await find(harness, query_id)
    answer = adopted(harness, query_id, asked.next_attempt, **fields)
    await harness.fake.send_to(asked.gateway_id, answer)
    return await looking, mesh_side(harness, answer)
