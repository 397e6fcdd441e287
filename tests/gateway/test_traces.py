"""`GET /v1/requests/{id}/trace`: what the mesh knows of a request, for whoever it belongs to and for nobody else."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.actor import Identity
from shared.ids import InstanceId, RequestId, Service, new_request_id
from shared.messages import DetokenizerStatus, Span, StepTaken
from shared.telemetry.answering import Answering
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing, new_span_id
from shared.transport.memory import MemoryTransport
from tests.gateway.fake_mesh import MODEL
from tests.gateway.harness import CHAT, Harness, running_gateway
from tests.shared.telemetry.spans import CONTEXT

OWNER_OF_KEY = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"
"""Of `key`, by SHA-256."""
ACME = {"Authorization": "Bearer key"}
ZOO = {"Authorization": "Bearer other"}


class _Scheduler:
    """An instance that answers with what a test has it keep."""

    def __init__(self, harness: Harness) -> None:
        self.tracing = Tracing(SpanStore(10))
        self.transport = MemoryTransport(harness.transport.broker)

    async def start(self, instance_id: InstanceId) -> None:
        await self.transport.connect()
        await Answering(Identity(Service.SCHEDULER, instance_id, "scheduler-1"), self.transport, self.tracing).start()

    def keep(self, request_id: RequestId, owner: str | None) -> None:
        self.tracing.record(Span(request_id, "queue", new_span_id(), CONTEXT, 1, 2), owner)


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A gateway with keys, whose mesh consists of nobody who would be waited for."""
    async with running_gateway(api_keys=("acme:key", "zoo:other"), starts_mesh=False) as harness:
        yield harness


@pytest.fixture
async def scheduler(harness: Harness) -> AsyncIterator[_Scheduler]:
    scheduler = _Scheduler(harness)
    await scheduler.start(InstanceId("scheduler-1"))
    await harness.fake._transport.connect()
    await harness.fake.announce(Service.SCHEDULER, InstanceId("scheduler-1"))
    await harness.settle()
    yield scheduler
    await scheduler.transport.close()


async def look(
    harness: Harness, request_id: str, headers: dict[str, str] | None = None, query: str = ""
) -> tuple[int, Any]:
    """The status and the document of a trace."""
    address = f"{harness.url}/v1/requests/{request_id}/trace{query}"
    async with harness.http.get(address, headers=headers or {}) as response:
        return response.status, await response.json()


async def _ask(harness: Harness) -> int:
    """The status of a chat."""
    async with harness.post("/v1/chat/completions", CHAT, headers=ACME) as response:
        return response.status


async def test_whoever_has_the_key_of_a_request_sees_it_and_nobody_else_does(
    harness: Harness, scheduler: _Scheduler
) -> None:
    request_id = new_request_id()
    scheduler.keep(request_id, OWNER_OF_KEY)
    status, timeline = await look(harness, request_id, ACME)
    assert status == 200
    assert [span["name"] for span in timeline["spans"]] == ["queue"]
    assert timeline["request_id"] == request_id
    assert set(timeline["instances"]["answered"]) == {"scheduler-1", harness.gateway.identity.instance_id}
    unknown = await look(harness, new_request_id(), ACME)
    assert unknown[0] == 404
    assert unknown == await look(harness, request_id, ZOO), "what is another's looks as what is not there"
    assert (await look(harness, request_id))[0] == 401


async def test_what_is_known_without_an_owner_is_shown_to_nobody(harness: Harness, scheduler: _Scheduler) -> None:
    request_id = new_request_id()
    scheduler.keep(request_id, None)
    assert (await look(harness, request_id, ACME))[0] == 404


async def test_where_there_are_no_keys_everything_is_everybodys() -> None:
    async with running_gateway(starts_mesh=False) as harness:
        scheduler = _Scheduler(harness)
        await scheduler.start(InstanceId("scheduler-1"))
        ids = [new_request_id() for _ in range(3)]
        for request_id, owner in zip(ids, (None, "", OWNER_OF_KEY), strict=True):
            scheduler.keep(request_id, owner)
        assert [(await look(harness, request_id))[0] for request_id in ids] == [200, 200, 404]
        await scheduler.transport.close()


async def test_a_request_that_goes_on_is_shown_at_once() -> None:
    async with running_gateway(api_keys=("acme:key",)) as harness:
        asking = asyncio.create_task(_ask(harness))
        request = await harness.fake.next_request()
        status, timeline = await look(harness, request.request_id, ACME)
        assert status == 200
        (span,) = timeline["spans"]
        assert (span["name"], span["duration_ms"]) == (f"chat {MODEL}", None)
        assert sorted(timeline["instances"]["silent"]) == [
            *("detokenizer-aaaaaaaa", "executor-aaaaaaaa", "scheduler-aaaaaaaa", "tokenizer-aaaaaaaa")
        ]
        await request.complete("Hello")
        assert await asking == 200


async def test_steps_are_listed_if_asked_for(harness: Harness, scheduler: _Scheduler) -> None:
    request_id = new_request_id()
    scheduler.keep(request_id, OWNER_OF_KEY)
    scheduler.tracing.steps_of = lambda _wanted: [StepTaken(7, 10, 5, 1, 1)]
    for query, is_listed in (("", False), ("?steps=false", False), ("?steps=true", True), ("?steps=1", True)):
        _, timeline = await look(harness, request_id, ACME, query)
        (steps,) = timeline["steps"]
        assert steps["num_steps"] == 1
        assert ("steps" in steps) is is_listed, query


@pytest.mark.parametrize(("query", "param"), [("?steps=maybe", "steps"), ("?verbose=1", "verbose")])
async def test_a_query_that_makes_no_sense_is_refused_by_name(harness: Harness, query: str, param: str) -> None:
    status, document = await look(harness, new_request_id(), ACME, query)
    assert (status, document["error"]["param"]) == (400, param)


@pytest.mark.parametrize("request_id", ["x", "req-unknown", "%ff%00", "req-" + "0" * 200])
async def test_what_is_no_request_is_unknown(harness: Harness, request_id: str) -> None:
    assert (await look(harness, request_id, ACME))[0] == 404


async def test_without_the_broker_nobody_can_be_asked(harness: Harness) -> None:
    await harness.transport.close()
    assert (await look(harness, new_request_id(), ACME))[0] == 503
    await harness.transport.connect()


async def test_too_many_at_once_are_told_to_come_back(harness: Harness) -> None:
    await harness.fake._transport.connect()
    status = DetokenizerStatus()
    await harness.fake.announce(Service.DETOKENIZER, InstanceId("detokenizer-dead"), status=status)
    await harness.settle()
    answers = await asyncio.gather(*(look(harness, new_request_id(), ACME) for _ in range(20)))
    statuses = [status for status, _ in answers]
    assert (statuses.count(404), statuses.count(429)) == (16, 4)
