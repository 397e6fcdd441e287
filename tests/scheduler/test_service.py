"""The scheduler service on an in-memory broker, with an executor, a detokenizer and a gateway played by the test."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.core.request import Request
from services.scheduler.delivery import Delivery, Stream
from services.scheduler.service import SchedulerService
from shared import subjects
from shared.actor import Identity, Tick
from shared.clock import FakeClock
from shared.codec import Decoder, encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    AttachExecutor,
    CancelRequest,
    ChoiceTokens,
    DecodeTokens,
    DetachExecutor,
    DetokenizerStatus,
    ExecutorAttached,
    ExecutorStatus,
    FinishReason,
    GatewayStatus,
    Message,
    Outcome,
    Presence,
    RequestAccepted,
    RequestClosed,
    RequestOpened,
    RequestRefused,
    RunStep,
    SchedulerStatus,
    StepCompleted,
    StepsMissing,
    StopStringFound,
    SubmitTokens,
    TextOptions,
    TokenLogprobs,
)
from shared.sampling import SamplingParams
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import FakeExecutor, undisturbed_output

SCHEDULER = InstanceId("scheduler-1")
EXECUTOR = InstanceId("executor-1")
GATEWAY = InstanceId("gateway-1")
DETOKENIZER = InstanceId("detokenizer-1")
PROMPT = list(range(1, 12))


class Peer:
    """Another instance: remembers what it was sent."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId, kinds: Any) -> None:
        self.instance_id = instance_id
        self.transport = MemoryTransport(broker)
        self.received: list[Any] = []
        self._decoder: Decoder[Any] = Decoder(kinds)

    async def start(self) -> None:
        await self.transport.connect()
        await self.transport.subscribe(subjects.inbox(self.instance_id), self._on_message)

    async def _on_message(self, payload: bytes, _headers: object) -> None:
        message = self._decoder.decode(payload)
        self.received.append(message)
        await self.react(message)

    async def react(self, message: Any) -> None:
        """What the peer does about it: nothing."""

    async def send(self, message: Message, to: InstanceId = SCHEDULER) -> None:
        await self.transport.publish(subjects.inbox(to), encode(message))

    async def beat(self, service: Service, status: Any, **fields: Any) -> None:
        presence = Presence(service, self.instance_id, self.instance_id, ("model",), status, **fields)
        await self.transport.publish(subjects.presence(service), encode(presence))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.received if isinstance(message, kind)]


class ExecutorPeer(Peer):
    """Runs plans on fingerprints. `is_working` off: plans pile up."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId = EXECUTOR) -> None:
        super().__init__(broker, instance_id, AttachExecutor | RunStep | DetachExecutor)
        self.capacity = make_capacity()
        self.fake = FakeExecutor(self.capacity)
        self.epoch = 1
        self.is_working = True

    async def react(self, message: Any) -> None:
        if isinstance(message, AttachExecutor):
            await self.send(ExecutorAttached(self.instance_id, self.epoch, self.capacity), message.scheduler_id)
        elif isinstance(message, RunStep) and self.is_working:
            await self.run(message)

    async def run(self, message: RunStep) -> None:
        await self.send(StepCompleted(self.instance_id, message.epoch, self.fake.run(message.plan)))

    async def announce(self, held_by: InstanceId | None = None, **fields: Any) -> None:
        await self.beat(Service.EXECUTOR, ExecutorStatus(held_by=held_by, epoch=self.epoch), **fields)

    def restart(self) -> None:
        self.fake = FakeExecutor(self.capacity)
        self.epoch += 1


class DetokenizerPeer(Peer):
    """Puts the logs together."""

    def __init__(self, broker: MemoryBroker, instance_id: InstanceId = DETOKENIZER) -> None:
        super().__init__(broker, instance_id, DecodeTokens)

    async def announce(self, **fields: Any) -> None:
        await self.beat(Service.DETOKENIZER, DetokenizerStatus(), **fields)

    def entries(self, request_id: str) -> list[ChoiceTokens]:
        return [e for batch in self.of(DecodeTokens) for e in batch.tokens if e.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        log: list[int] = []
        for entry in self.entries(request_id):
            log[entry.offset :] = entry.token_ids
        return log

    def closed(self, request_id: str | None = None) -> list[RequestClosed]:
        return [c for batch in self.of(DecodeTokens) for c in batch.closed if request_id in (None, c.request_id)]


class Mesh:
    """A scheduler service, its peers, and a clock that only the test moves."""

    def __init__(self, config: SchedulerConfig, max_payload: int) -> None:
        self.broker = MemoryBroker(max_payload=max_payload)
        self.clock = FakeClock()
        self.executor = ExecutorPeer(self.broker)
        self.detokenizer = DetokenizerPeer(self.broker)
        self.gateway = Peer(self.broker, GATEWAY, RequestAccepted | RequestRefused)
        self.transport = MemoryTransport(self.broker)
        identity = Identity(Service.SCHEDULER, SCHEDULER, "scheduler-1")
        self.service = SchedulerService(identity, self.transport, self.clock, config)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110  # the condition is anything, not one event
                await asyncio.sleep(0.001)

    async def settle(self) -> None:
        """Let everything that was sent be handled: everything is in this process, so rounds of the loop suffice."""
        num_quiet_rounds = 0
        while num_quiet_rounds < 20:
            await asyncio.sleep(0)
            num_quiet_rounds = 0 if self.broker.num_undelivered else num_quiet_rounds + 1

    async def pass_time(self, seconds: float) -> None:
        """Move the clock in small steps, and let the scheduler notice each."""
        target = self.clock.now() + seconds
        while self.clock.now() < target:
            self.clock.advance(0.25)
            self.service.post(Tick())
            await self.settle()

    async def ready(self) -> None:
        await self.detokenizer.announce()
        await self.executor.announce()
        await self.until(lambda: self.service.models() == ("model",))
        await self.settle()

    async def submit(self, name: str, **fields: Any) -> None:
        await self.gateway.send(submission(name, **fields))


def submission(
    name: str,
    *,
    prompt: list[int] = PROMPT,
    max_tokens: int | None = 5,
    seed: int = 0,
    num_choices: int = 1,
    end_token_ids: tuple[int, ...] = (),
    tenant: str = "a",
    num_logprobs: int | None = None,
) -> SubmitTokens:
    return SubmitTokens(
        request_id=RequestId(name),
        gateway_id=GATEWAY,
        model="model",
        tenant=tenant,
        prompt_token_ids=array("i", prompt),
        sampling=SamplingParams(seed=seed, end_token_ids=end_token_ids, num_logprobs=num_logprobs),
        text=TextOptions(),
        num_choices=num_choices,
        max_tokens=max_tokens,
    )


@pytest.fixture
def max_payload(request: pytest.FixtureRequest) -> int:
    size: int = getattr(request, "param", 1 << 20)
    return size


@pytest.fixture
async def mesh(request: pytest.FixtureRequest, max_payload: int) -> AsyncIterator[Mesh]:
    mesh = Mesh(getattr(request, "param", SchedulerConfig()), max_payload)
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.start()
    await mesh.transport.connect()
    async with mesh.service as service:
        running = asyncio.create_task(service.run())
        yield mesh
        service.drain(0)
        await running
    for peer in (mesh.executor, mesh.detokenizer, mesh.gateway):
        await peer.transport.close()
    await mesh.transport.close()


configured = pytest.mark.parametrize(
    "mesh", [SchedulerConfig(pipeline_depth=1), SchedulerConfig(pipeline_depth=2)], indirect=True, ids=["1", "2"]
)


@configured
async def test_a_request_is_accepted_computed_delivered_and_closed_once(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.gateway.received == [RequestAccepted(RequestId("r"), SCHEDULER, len(PROMPT))]
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 5)
    (closed,) = mesh.detokenizer.closed()
    assert closed.outcome is Outcome.COMPLETED
    assert closed.usage.num_output_tokens == (5,)
    assert mesh.service.is_idle()


async def test_one_step_makes_one_message_for_the_detokenizer(mesh: Mesh) -> None:
    await mesh.ready()
    for number in range(6):
        await mesh.submit(f"r{number}", prompt=[number, *PROMPT], max_tokens=4)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 6)
    num_steps = len(mesh.executor.of(RunStep))
    assert len(mesh.detokenizer.of(DecodeTokens)) <= num_steps + 2
    assert num_steps < 6 * 4


async def test_without_max_tokens_the_executor_room_is_the_limit(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r", max_tokens=None)
    await mesh.until(mesh.detokenizer.closed)
    limit = mesh.executor.capacity.num_blocks * mesh.executor.capacity.block_size
    assert len(PROMPT) + len(mesh.detokenizer.tokens("r")) == limit


async def test_a_repeated_submission_is_acknowledged_again_and_run_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.gateway.of(RequestAccepted)) == 2)
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(mesh.detokenizer.closed)
    await mesh.submit("r")
    await mesh.settle()
    assert len(mesh.gateway.of(RequestAccepted)) == 2, "a repetition after the end starts nothing"
    assert len(mesh.detokenizer.closed()) == 1


async def test_refusals_say_why(mesh: Mesh) -> None:
    await mesh.submit("early")
    await mesh.until(lambda: len(mesh.gateway.received) == 1)
    await mesh.ready()
    await mesh.submit("huge", prompt=list(range(250)), max_tokens=50)
    await mesh.until(lambda: len(mesh.gateway.received) == 2)
    early, huge = (refused.error for refused in mesh.gateway.of(RequestRefused))
    assert (early.status, early.retry_after_s) == (503, 1.0)
    assert huge.status == 400
    assert "250 tokens of prompt and 50 to generate make 300; an executor holds 256" in huge.message


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_waiting_requests=2)], indirect=True)
async def test_a_full_queue_refuses_with_a_time_to_wait(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    for number in range(5):  # the first fills the pipeline, two wait
        await mesh.submit(f"r{number}", max_tokens=20)
        await mesh.settle()
    refused = mesh.gateway.of(RequestRefused)
    assert {refusal.error.status for refusal in refused} == {429}
    assert all(refusal.error.retry_after_s for refusal in refused)
    assert (len(mesh.gateway.of(RequestAccepted)), len(refused)) == (3, 2)


async def test_cancel_stops_a_request_and_closes_it_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    for _ in range(2):
        await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.until(mesh.detokenizer.closed)
    await mesh.settle()
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    (view,) = mesh.service.status().executors
    assert view.num_free_blocks == view.num_blocks


async def test_a_cancel_that_comes_before_its_request_still_cancels_it(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    assert [closed.outcome for closed in mesh.detokenizer.closed()] == [Outcome.CANCELLED]
    assert mesh.executor.of(RunStep) == []


async def test_a_cancel_after_the_end_does_nothing(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r")
    await mesh.until(mesh.detokenizer.closed)
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    assert len(mesh.detokenizer.closed()) == 1


async def test_a_stop_string_ends_the_choice_where_the_text_did(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=50)
    for _ in range(4):
        await mesh.until(lambda: len(mesh.executor.of(RunStep)) > mesh.executor.fake.num_rows_run)
        await mesh.executor.run(mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run])
    await mesh.until(lambda: len(mesh.detokenizer.tokens("r")) == 4)
    await mesh.detokenizer.send(StopStringFound(RequestId("r"), 0, 2))
    await mesh.until(mesh.detokenizer.closed)
    last = mesh.detokenizer.entries("r")[-1]
    assert (last.offset, len(last.token_ids), last.finish_reason) == (2, 0, FinishReason.STOP)
    assert mesh.detokenizer.closed()[0].usage.num_output_tokens == (2,)


async def test_a_result_that_comes_twice_counts_once(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=3)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    first = mesh.executor.of(RunStep)[0]
    completed = StepCompleted(EXECUTOR, first.epoch, mesh.executor.fake.run(first.plan))
    for _ in range(2):
        await mesh.executor.send(completed)
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    await mesh.settle()
    assert len(mesh.detokenizer.tokens("r")) == 1


async def test_plans_are_sent_again_when_asked_for_or_when_results_are_late(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.executor.send(StepsMissing(EXECUTOR, 1, 2))
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 3)
    assert [message.plan.step_id for message in mesh.executor.of(RunStep)] == [1, 2, 2]
    for _ in range(14):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.pass_time(0.25)
    assert [message.plan.step_id for message in mesh.executor.of(RunStep)] == [1, 2, 2, 1, 2]


async def test_results_of_another_epoch_are_passed_over(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=1)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    result = mesh.executor.fake.run(mesh.executor.of(RunStep)[0].plan)
    await mesh.executor.send(StepCompleted(EXECUTOR, 7, result))
    await mesh.settle()
    assert mesh.detokenizer.closed() == []
    await mesh.executor.send(StepCompleted(EXECUTOR, 1, result))
    await mesh.until(mesh.detokenizer.closed)


async def test_requests_of_a_silent_executor_go_on_when_it_is_back(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=4)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    for _ in range(8):
        await mesh.detokenizer.announce()
        await mesh.pass_time(0.25)
    assert mesh.service.models() == ()
    mesh.executor.restart()
    mesh.executor.is_working = True
    await mesh.executor.announce()
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 4)
    assert mesh.detokenizer.closed()[0].outcome is Outcome.COMPLETED


async def test_an_executor_that_says_it_is_free_was_lost_and_is_attached_again(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=4)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    mesh.executor.restart()
    mesh.executor.is_working = True
    await mesh.executor.announce()
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 4)


async def test_a_beat_from_before_the_attachment_is_no_loss(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.epoch = 0
    await mesh.executor.announce()
    await mesh.settle()
    assert mesh.service.models() == ("model",)


async def test_an_executor_held_by_a_living_scheduler_is_left_alone(mesh: Mesh) -> None:
    other = Peer(mesh.broker, InstanceId("scheduler-2"), AttachExecutor)
    await other.start()
    await other.beat(Service.SCHEDULER, SchedulerStatus())
    await mesh.executor.announce(held_by=InstanceId("scheduler-2"))
    await mesh.settle()
    assert mesh.executor.of(AttachExecutor) == []
    await mesh.pass_time(2.0)
    await mesh.executor.announce(held_by=InstanceId("scheduler-2"))
    await mesh.until(lambda: mesh.executor.of(AttachExecutor))
    await other.transport.close()


async def test_a_lost_detokenizer_is_replaced_and_gets_the_whole_log(mesh: Mesh) -> None:
    await mesh.ready()
    second = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await second.start()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=5)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    await mesh.detokenizer.announce(is_leaving=True)
    await mesh.settle()
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep)[1:]:
        await mesh.executor.run(plan)
    await mesh.settle()
    await second.announce()
    await mesh.until(second.closed)
    assert [opened.request_id for opened in second.of(DecodeTokens)[0].opened] == ["r"]
    assert second.tokens("r") == undisturbed_output(PROMPT, 0, 0, 5)
    assert mesh.service.is_idle()
    await second.transport.close()


async def test_the_end_of_a_request_without_detokenizer_and_gateway_is_forgotten(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.detokenizer.announce(is_leaving=True)
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    assert not mesh.service.is_idle()
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"))
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"), is_leaving=True)
    await mesh.settle()
    assert mesh.service.is_idle()


async def test_requests_of_a_gateway_that_is_gone_are_cancelled(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"))
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.gateway.beat(Service.GATEWAY, GatewayStatus("127.0.0.1:1"), is_leaving=True)
    await mesh.until(mesh.detokenizer.closed)
    assert mesh.service.is_idle()


async def test_leaving_lets_the_executor_go(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.service.on_stop()
    await mesh.until(lambda: mesh.executor.of(DetachExecutor))
    assert mesh.executor.of(DetachExecutor) == [DetachExecutor(SCHEDULER, 1)]


async def test_a_draining_scheduler_refuses_new_requests_and_finishes_the_others(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("old")
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    mesh.service.drain(60)
    await mesh.submit("new")
    await mesh.until(lambda: mesh.gateway.of(RequestRefused))
    assert mesh.gateway.of(RequestRefused)[0].error.status == 503
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.detokenizer.closed("old"))


async def test_status_counts_what_happened(mesh: Mesh) -> None:
    await mesh.ready()
    for number in (1, 2):
        await mesh.submit(f"r{number}", max_tokens=3)
        await mesh.settle()
    assert len(mesh.detokenizer.closed()) == 2
    status = mesh.service.status()
    assert (status.num_waiting, status.num_running) == (0, 0)
    assert status.num_prompt_tokens == 2 * len(PROMPT)
    assert status.num_cached_tokens == 8
    assert status.num_output_tokens == 6


async def cached_tokens_of_the_same_prompt_for_another_tenant(mesh: Mesh) -> int:
    await mesh.ready()
    for number, tenant in enumerate(("a", "b")):
        await mesh.submit(f"r{number}", tenant=tenant, max_tokens=1)
        await mesh.settle()
    return mesh.detokenizer.closed("r1")[0].usage.num_cached_tokens


async def test_tenants_do_not_share_prefixes(mesh: Mesh) -> None:
    assert await cached_tokens_of_the_same_prompt_for_another_tenant(mesh) == 0


@pytest.mark.parametrize("mesh", [SchedulerConfig(share_prefixes=True)], indirect=True)
async def test_tenants_share_prefixes_if_the_operator_says_so(mesh: Mesh) -> None:
    assert await cached_tokens_of_the_same_prompt_for_another_tenant(mesh) > 0


@pytest.mark.parametrize("mesh", [SchedulerConfig(prefix_cache=False)], indirect=True)
async def test_without_a_prefix_cache_nothing_is_reused(mesh: Mesh) -> None:
    await mesh.ready()
    for number in range(2):
        await mesh.submit(f"r{number}", max_tokens=1)
        await mesh.settle()
    assert mesh.service.status().num_cached_tokens == 0


@pytest.mark.parametrize("mesh", [SchedulerConfig(max_step_tokens=8)], indirect=True)
async def test_a_step_is_as_small_as_the_operator_says(mesh: Mesh) -> None:
    await mesh.ready()
    await mesh.submit("r", max_tokens=1)
    await mesh.until(mesh.detokenizer.closed)
    assert [sum(message.plan.counts) for message in mesh.executor.of(RunStep)] == [8, 3]


async def test_timing_tells_of_the_queue_the_first_token_and_the_whole(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=2)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    mesh.clock.advance(1.0)
    await mesh.executor.run(mesh.executor.of(RunStep)[0])
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    mesh.clock.advance(0.5)
    await mesh.executor.run(mesh.executor.of(RunStep)[1])
    await mesh.until(mesh.detokenizer.closed)
    timing = mesh.detokenizer.closed()[0].timing
    assert (timing.queue_s, timing.first_token_s, timing.total_s) == (0.0, 1.0, 1.5)


async def test_a_draining_executor_is_not_attached(mesh: Mesh) -> None:
    await mesh.executor.announce(is_draining=True)
    await mesh.settle()
    assert mesh.executor.of(AttachExecutor) == []


async def test_a_draining_scheduler_attaches_no_executor(mesh: Mesh) -> None:
    mesh.executor.is_working = False
    await mesh.ready()
    await mesh.submit("r")  # so that it has a reason to stay
    await mesh.settle()
    mesh.service.drain(60)
    other = ExecutorPeer(mesh.broker, InstanceId("executor-2"))
    await other.start()
    await other.announce()
    await mesh.settle()
    assert other.of(AttachExecutor) == []
    await other.transport.close()


async def test_an_attached_executor_that_drains_finishes_what_it_has_and_is_let_go(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", max_tokens=3)
    await mesh.until(lambda: len(mesh.executor.of(RunStep)) == 2)
    await mesh.executor.announce(held_by=SCHEDULER, is_draining=True)
    await mesh.settle()
    assert mesh.executor.of(DetachExecutor) == []
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.until(lambda: mesh.executor.of(DetachExecutor))
    assert mesh.detokenizer.tokens("r") == undisturbed_output(PROMPT, 0, 0, 3)
    assert mesh.service.models() == ()


async def test_streams_go_to_the_detokenizer_with_fewest_and_not_to_one_that_drains(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    second, third = (DetokenizerPeer(mesh.broker, InstanceId(f"detokenizer-{n}")) for n in (2, 3))
    for peer in (second, third):
        await peer.start()
    await second.announce()
    await third.announce(is_draining=True)
    for number in range(4):
        await mesh.submit(f"r{number}")
    await mesh.settle()
    opened = [len([o for batch in peer.of(DecodeTokens) for o in batch.opened]) for peer in (mesh.detokenizer, second)]
    assert opened == [2, 2]
    assert third.received == []
    for peer in (second, third):
        await peer.transport.close()


async def test_log_probabilities_come_again_with_the_log(mesh: Mesh) -> None:
    await mesh.ready()
    mesh.executor.is_working = False
    second = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await second.start()
    await mesh.submit("r", max_tokens=5, num_logprobs=1)
    await mesh.until(lambda: mesh.executor.of(RunStep))
    step = mesh.executor.of(RunStep)[0]
    logprob = TokenLogprobs(-0.5, array("i", [3]), (-0.25,))
    result = replace(mesh.executor.fake.run(step.plan), logprobs=(logprob,))
    await mesh.executor.send(StepCompleted(EXECUTOR, step.epoch, result))
    await mesh.until(lambda: mesh.detokenizer.tokens("r"))
    await mesh.detokenizer.announce(is_leaving=True)
    await second.announce()
    await mesh.until(lambda: second.tokens("r"))
    assert second.entries("r")[0].logprobs == (logprob,)
    await second.transport.close()


@pytest.mark.parametrize("max_payload", [40_000], indirect=True)
async def test_messages_stay_within_what_the_broker_carries(mesh: Mesh, max_payload: int) -> None:
    """Many choices at once that share a long prompt, and then the whole logs to another detokenizer."""
    mesh.executor.capacity = make_capacity(max_slots=64, num_blocks=1000)
    mesh.executor.restart()
    await mesh.ready()
    prompt = [number % 40 for number in range(600)]
    await mesh.submit("first", prompt=prompt, max_tokens=1)
    await mesh.settle()
    for number in range(40):
        await mesh.submit(f"r{number}", prompt=prompt, max_tokens=30, num_choices=2)
    await mesh.settle()
    second = DetokenizerPeer(mesh.broker, InstanceId("detokenizer-2"))
    await second.start()
    await mesh.detokenizer.announce(is_leaving=True)
    await second.announce()
    await mesh.until(lambda: mesh.service.is_idle())
    await mesh.settle()
    assert len(mesh.detokenizer.closed()) + len(second.closed()) == 41
    assert all(len(encode(message)) <= max_payload for message in mesh.executor.of(RunStep))
    await second.transport.close()


def test_a_long_log_is_sent_again_in_pieces_that_fit() -> None:
    request = Request(RequestId("r"), array("i", [1]), SamplingParams(seed=1), arrival=0, max_tokens=2000)
    choice = request.choices[0]
    choice.output.extend(range(1500))
    choice.logprobs += [TokenLogprobs(-1.0, array("i", range(20)), (-1.0,) * 20)] * 1500
    delivery = Delivery(SCHEDULER)
    opened = RequestOpened(RequestId("r"), SCHEDULER, GATEWAY, "model", TextOptions(), 1)
    delivery.open(Stream(request, opened, 0.0), [])
    first = Presence(Service.DETOKENIZER, DETOKENIZER, "d", ("model",), DetokenizerStatus())
    delivery.settle([first])
    messages = [message for _, message in delivery.flush(max_message_bytes=200_000)]
    assert len(messages) > 2
    assert all(len(encode(message)) <= 200_000 for message in messages)
    tokens = [token for message in messages for entry in message.tokens for token in entry.token_ids]
    assert tokens == list(range(1500))
    assert [entry.offset for message in messages for entry in message.tokens] == list(range(0, 1500, 256))
