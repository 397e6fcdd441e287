"""The scheduler service: tokens on their way to detokenizers, within what the broker carries."""

from array import array

import pytest
from msgspec.structs import replace

from services.scheduler.core.request import Request
from services.scheduler.delivery import Delivery
from services.scheduler.retention import Retention
from services.scheduler.streams import Stream
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import (
    CancelRequest,
    DecodeTokens,
    DetokenizerStatus,
    GatewayStatus,
    Presence,
    RequestOpened,
    RequestRefused,
    RunStep,
    StepCompleted,
    TextOptions,
    TokenLogprobs,
)
from shared.sampling import SamplingParams
from tests.scheduler.driver import make_capacity
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import DETOKENIZER, EXECUTOR, GATEWAY, PROMPT, SCHEDULER, DetokenizerPeer, Mesh, submission


async def test_one_step_makes_one_message_for_the_detokenizer(mesh: Mesh) -> None:
    await mesh.ready()
    for number in range(6):
        await mesh.submit(f"r{number}", prompt=[number, *PROMPT], max_tokens=4)
    await mesh.until(lambda: len(mesh.detokenizer.closed()) == 6)
    num_steps = len(mesh.executor.of(RunStep))
    assert len(mesh.detokenizer.of(DecodeTokens)) <= num_steps + 2
    assert num_steps < 6 * 4


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
    await mesh.pass_time(0.25)
    assert mesh.service.is_idle()


async def test_a_submission_is_refused_for_now_while_no_detokenizer_serves_the_model(mesh: Mesh) -> None:
    """Accepted, its tokens would pile up here, and so would those of the next thousand."""
    await mesh.executor.announce()
    await mesh.until(lambda: mesh.service.models() == ("model",))
    for number in range(5):
        await mesh.submit(f"r{number}")
    await mesh.until(lambda: len(mesh.gateway.of(RequestRefused)) == 5)
    refusal = mesh.gateway.of(RequestRefused)[0].error
    assert (refusal.status, refusal.retry_after_s) == (503, 1.0)
    assert mesh.service.is_idle()
    await mesh.detokenizer.announce(is_draining=True)
    await mesh.submit("r5")
    await mesh.until(lambda: len(mesh.gateway.of(RequestRefused)) == 6)
    await mesh.detokenizer.announce()
    await mesh.submit("r6")
    await mesh.until(lambda: mesh.detokenizer.closed("r6"))


async def end_without_detokenizer(mesh: Mesh) -> None:
    """A request ends whose detokenizer has left."""
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r")
    await mesh.until(lambda: mesh.executor.of(RunStep))
    await mesh.detokenizer.announce(is_leaving=True)
    await mesh.settle()
    mesh.executor.is_working = True
    for plan in mesh.executor.of(RunStep):
        await mesh.executor.run(plan)
    await mesh.settle()
    assert mesh.service.status().num_running == 0
    assert not mesh.service.is_idle()


async def test_who_cancels_a_request_whose_end_waits_for_a_detokenizer_wants_to_hear_no_more(mesh: Mesh) -> None:
    await end_without_detokenizer(mesh)
    await mesh.gateway.send(CancelRequest(RequestId("r"), GATEWAY))
    await mesh.settle()
    assert mesh.service.is_idle()
    await mesh.detokenizer.announce()
    await mesh.settle()
    assert mesh.detokenizer.closed() == []


async def test_the_end_of_a_request_waits_a_minute_for_a_detokenizer(mesh: Mesh) -> None:
    await end_without_detokenizer(mesh)
    await mesh.executor.announce(held_by=SCHEDULER)
    await mesh.pass_time(59.0)
    assert not mesh.service.is_idle()
    await mesh.pass_time(1.5)
    assert mesh.service.is_idle()


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
    delivery = Delivery(SCHEDULER, Retention(60.0, 1_000_000))
    opened = RequestOpened(RequestId("r"), SCHEDULER, GATEWAY, "model", TextOptions(), 1)
    delivery.open(Stream(request, submission("r"), opened, 0.0), [])
    first = Presence(Service.DETOKENIZER, DETOKENIZER, "d", ("model",), DetokenizerStatus())
    delivery.settle([first], 0.0)
    messages = [message for _, message in delivery.flush(max_message_bytes=200_000)]
    assert len(messages) > 2
    assert all(len(encode(message)) <= 200_000 for message in messages)
    tokens = [token for message in messages for entry in message.tokens for token in entry.token_ids]
    assert tokens == list(range(1500))
    assert [entry.offset for message in messages for entry in message.tokens] == list(range(0, 1500, 256))
