"""The question to all instances: everybody answers, nobody is waited for in vain, and what is too large is told of."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared import subjects
from shared.actor import Identity
from shared.codec import Decoder, encode
from shared.errors import Disconnected, Overloaded
from shared.ids import InstanceId, Service
from shared.messages import Span, SpansFound, SpansWanted, StepTaken
from shared.telemetry.answering import Answering
from shared.telemetry.asking import Answers, Asking
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.loop_time import let_pass
from tests.shared.telemetry.spans import request_id, span_of

ASKER = InstanceId("gateway-1")


class _Mesh:
    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.transports: list[MemoryTransport] = []
        self.asking: Asking

    async def transport(self) -> MemoryTransport:
        transport = MemoryTransport(self.broker)
        await transport.connect()
        self.transports.append(transport)
        return transport

    async def add(self, service: Service, *spans: Span, owner: str | None = None) -> Tracing:
        """One more instance, which keeps these spans."""
        tracing = Tracing(SpanStore(100))
        for span in spans:
            tracing.record(span, owner)
        identity = Identity(service, InstanceId(f"{service}-1"), f"{service} one")
        await Answering(identity, await self.transport(), tracing).start()
        return tracing

    async def ask_until_time_is_over(self, alive: list[InstanceId]) -> Answers:
        """What is known of the first request when all that is on its way has come, and then nobody is waited for."""
        asking = asyncio.create_task(self.asking.ask(request_id(1), alive, patience_s=3600))
        for _ in range(100):  # everything is in this process, so rounds of the loop suffice
            await asyncio.sleep(0)
        assert not asking.done()
        let_pass(3600)
        return await asyncio.wait_for(asking, 30)


@pytest.fixture
async def mesh() -> AsyncIterator[_Mesh]:
    mesh = _Mesh()
    mesh.asking = Asking(ASKER, await mesh.transport())
    await mesh.asking.start()
    yield mesh
    for transport in mesh.transports:
        await transport.close()


async def test_everybody_tells_what_it_knows_and_nobody_is_waited_for_longer(mesh: _Mesh) -> None:
    queue = span_of(1, "queue")
    await mesh.add(Service.SCHEDULER, queue, span_of(2), owner="acme")
    await mesh.add(Service.EXECUTOR)
    alive = [InstanceId("scheduler-1"), InstanceId("executor-1")]
    async with asyncio.timeout(10):
        answers = await mesh.asking.ask(request_id(1), alive, patience_s=3600)
    assert answers.silent == ()
    found = {answer.instance_id: answer for answer in answers.found}
    assert found[alive[0]].spans == (queue,)
    assert (found[alive[0]].name, found[alive[0]].owner) == ("scheduler one", "acme")
    assert (found[alive[1]].spans, found[alive[1]].owner) == ((), None)


async def test_who_does_not_answer_is_named_after_a_while(mesh: _Mesh) -> None:
    await mesh.add(Service.SCHEDULER, span_of(1))
    dead = InstanceId("executor-dead")
    answers = await mesh.ask_until_time_is_over([InstanceId("scheduler-1"), dead])
    assert [answer.instance_id for answer in answers.found] == ["scheduler-1"]
    assert answers.silent == (dead,)


async def test_an_instance_that_nobody_had_heard_of_is_heard_as_well(mesh: _Mesh) -> None:
    await mesh.add(Service.SCHEDULER, span_of(1))
    answers = await mesh.ask_until_time_is_over([InstanceId("executor-dead")])
    assert [answer.instance_id for answer in answers.found] == ["scheduler-1"]


async def test_what_goes_on_and_steps_are_told_of_too(mesh: _Mesh) -> None:
    tracing = await mesh.add(Service.EXECUTOR)
    going_on, steps = span_of(1, "decode", end_ns=0), [StepTaken(number, number, 5, 1, 1) for number in range(9000)]
    tracing.open_spans.append(lambda wanted: [going_on] if wanted == request_id(1) else [])
    tracing.steps_of = lambda _wanted: steps
    (found,) = (await mesh.asking.ask(request_id(1), [InstanceId("executor-1")], patience_s=3600)).found
    assert found.spans == (going_on,)
    assert found.steps == tuple(steps[-8192:]), "the latest"
    assert found.num_left_out == 9000 - 8192


async def test_an_answer_that_the_broker_does_not_carry_is_told_without_its_largest_parts(mesh: _Mesh) -> None:
    tracing = await mesh.add(Service.EXECUTOR, *[span_of(1) for _ in range(10)], owner="acme")
    tracing.steps_of = lambda _wanted: [StepTaken(number, 2**60, 2**40, 1, 1) for number in range(1000)]
    mesh.broker.max_payload = 4000
    (found,) = (await mesh.asking.ask(request_id(1), [InstanceId("executor-1")], patience_s=3600)).found
    assert (len(found.spans), found.steps, found.num_left_out) == (10, (), 1000)
    mesh.broker.max_payload = 400
    (found,) = (await mesh.asking.ask(request_id(1), [InstanceId("executor-1")], patience_s=3600)).found
    assert (found.spans, found.num_left_out, found.owner) == ((), 1010, "acme")


async def test_so_many_may_ask_at_once_and_no_more(mesh: _Mesh) -> None:
    nobody = [InstanceId("executor-dead")]
    asking = [asyncio.create_task(mesh.asking.ask(request_id(n), nobody, patience_s=3600)) for n in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await mesh.asking.ask(request_id(99), nobody)
    assert caught.value.retry_after_s
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await mesh.asking.ask(request_id(99), [])


async def test_without_the_broker_nobody_can_be_asked(mesh: _Mesh) -> None:
    await mesh.transports[0].close()
    with pytest.raises(Disconnected):
        await mesh.asking.ask(request_id(1), [])


async def test_nonsense_on_either_subject_is_dropped(mesh: _Mesh, caplog: pytest.LogCaptureFixture) -> None:
    await mesh.add(Service.SCHEDULER, span_of(1))
    sender = await mesh.transport()
    for subject in (subjects.TRACES, subjects.trace_answers(ASKER)):
        await sender.publish(subject, b"no message")
    late = SpansFound("trace-of-before", InstanceId("scheduler-1"), "scheduler one")
    await sender.publish(subjects.trace_answers(ASKER), encode(late))
    answers = await mesh.asking.ask(request_id(1), [InstanceId("scheduler-1")], patience_s=3600)
    assert len(answers.found) == 1
    assert sum("dropped" in record.message for record in caplog.records) == 2


async def test_an_answer_goes_to_whoever_asked(mesh: _Mesh) -> None:
    await mesh.add(Service.SCHEDULER, span_of(1))
    other, heard = InstanceId("cli-7"), asyncio.Queue[SpansFound]()
    decoder = Decoder[SpansFound](SpansFound)
    transport = await mesh.transport()

    async def hear(payload: bytes, _headers: object) -> None:
        heard.put_nowait(decoder.decode(payload))

    await transport.subscribe(subjects.trace_answers(other), hear)
    await transport.publish(subjects.TRACES, encode(SpansWanted("q", other, request_id(1))))
    answer = await asyncio.wait_for(heard.get(), 10)
    assert (answer.query_id, len(answer.spans)) == ("q", 1)
