"""One request that has some tokens and goes no further by itself, and what others ask about it."""

from typing import Any

from shared import attempts, subjects
from shared.codec import encode
from shared.ids import InstanceId, RequestId, Service
from shared.messages import AdoptRequest, FindRequest, Message, Presence, RequestReleased, RunStep, SchedulerStatus
from tests.scheduler.fake_executor import undisturbed_output
from tests.scheduler.harness import PROMPT, SCHEDULER, GatewayPeer, Mesh

R = RequestId("r")
OTHER = InstanceId("gateway-2")
OTHER_SCHEDULER = InstanceId("scheduler-2")
RESUMABLE: dict[str, Any] = {"client": b"chat", "owner": "me"}


def output(index: int = 0, num_tokens: int = 5) -> list[int]:
    return undisturbed_output(PROMPT, 0, index, num_tokens)


def find(owner: str = "me", request_id: str = "r", gateway_id: InstanceId = OTHER) -> FindRequest:
    return FindRequest("query", RequestId(request_id), owner, gateway_id)


def adopt(attempt: int = 1, gateway_id: InstanceId = OTHER) -> AdoptRequest:
    return AdoptRequest("query", R, "me", gateway_id, attempt, attempts.after_adoption(attempt, gateway_id))


ADOPTED = attempts.after_adoption(1, OTHER)
"""As which the other gateway adopts the first attempt."""


async def ask_all(mesh: Mesh, message: Message) -> None:
    """Ask all schedulers, as gateways do."""
    await mesh.gateway.transport.publish(subjects.ADOPTIONS, encode(message))
    await mesh.settle()


async def tell(mesh: Mesh, message: Message) -> None:
    await mesh.gateway.send(message)
    await mesh.settle()


async def begin(mesh: Mesh, num_tokens: int = 2, **fields: Any) -> None:
    """A request that has some tokens and goes no further by itself."""
    await mesh.ready()
    mesh.executor.is_working = False
    await mesh.submit("r", **fields)
    while len(mesh.detokenizer.tokens("r")) < num_tokens:
        await mesh.until(lambda: len(mesh.executor.of(RunStep)) > mesh.executor.fake.num_rows_run)
        await mesh.executor.run(mesh.executor.of(RunStep)[mesh.executor.fake.num_rows_run])
        await mesh.settle()


async def go_on(mesh: Mesh) -> None:
    """Let the executor run what it was given, and all that follows."""
    mesh.executor.is_working = True
    plans = {message.plan.step_id: message for message in mesh.executor.of(RunStep)}  # some were sent again
    for message in list(plans.values())[mesh.executor.fake.num_rows_run :]:
        await mesh.executor.run(message)
    await mesh.settle()


async def lose_gateway(mesh: Mesh) -> None:
    await mesh.gateway.announce()
    await mesh.gateway.announce(is_leaving=True)
    await mesh.settle()


async def keep_alive(mesh: Mesh, seconds: float) -> None:
    """Let time pass for all but the gateway."""
    for _ in range(int(seconds)):
        await mesh.executor.announce(held_by=SCHEDULER)
        await mesh.detokenizer.announce()
        await mesh.settle()
        await mesh.pass_time(1.0)


async def announce_another_scheduler(mesh: Mesh, *models: str) -> None:
    beat = Presence(Service.SCHEDULER, OTHER_SCHEDULER, "other", models, SchedulerStatus())
    await mesh.gateway.transport.publish(subjects.presence(Service.SCHEDULER), encode(beat))
    await mesh.settle()


def releases(gateway: GatewayPeer) -> list[tuple[RequestId, InstanceId, int]]:
    """What a gateway was told of attempts that have to go on elsewhere."""
    return [(told.request_id, told.scheduler_id, told.attempt) for told in gateway.of(RequestReleased)]


async def release(mesh: Mesh, **fields: Any) -> None:
    """A request that has two tokens, and whose executor is gone while another scheduler has one."""
    await mesh.gateway.announce()
    await begin(mesh, **fields)
    await mesh.executor.announce(is_leaving=True)
    await announce_another_scheduler(mesh, "model")
    await mesh.pass_time(0.25)
    assert releases(mesh.gateway)[:1] == [(R, SCHEDULER, 1)]
