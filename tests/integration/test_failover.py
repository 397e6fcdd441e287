"""Whatever dies or freezes in the middle of streams, every client gets what an undisturbed run would have given it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.executor.model_runner import ModelRunner
from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway
from services.gateway.submissions import Outgoing
from services.scheduler.config import SchedulerConfig
from shared.ids import Service
from shared.messages import RequestReleased
from shared.transport import Transport
from shared.transport.memory import MemoryBroker, MemoryTransport
from shared.transport.nats import NatsTransport
from tests.conftest import NatsServer
from tests.integration.cast import Cast, Disconnected, Disturbance, Player, Streamed, cast, create, follow, resume
from tests.integration.disturbed import TEXT, check_same, undisturbed, until_begun
from tests.standstills import Standstills


@pytest.fixture(params=["memory", "nats"])
def connect(request: pytest.FixtureRequest) -> Callable[[str], Transport]:
    if request.param == "memory":
        broker = MemoryBroker()
        return lambda _name: MemoryTransport(broker)
    server: NatsServer = request.getfixturevalue("private_nats_server")
    server.start()
    return lambda name: NatsTransport(server.url, name=name)


@pytest.fixture
async def mesh(folder: Path, runners: list[ModelRunner], connect: Callable[[str], Transport]) -> AsyncIterator[Cast]:
    async with cast(folder, runners, connect) as mesh:
        yield mesh
        await mesh.until_nothing_is_left()


def find(mesh: Cast, service: Service) -> Player:
    """One that the streams depend on."""
    if service is Service.SCHEDULER:
        return mesh.holder()
    if service is Service.DETOKENIZER:
        return max(mesh.of(service), key=lambda one: one.status.num_open_requests)
    if service is Service.EXECUTOR:
        return next(one for one in mesh.of(service) if one.status.held_by == mesh.holder().actor.identity.instance_id)
    return mesh.of(service)[0]


async def kill(mesh: Cast, service: Service) -> None:
    await find(mesh, service).kill()


async def leave(mesh: Cast, service: Service) -> None:
    await find(mesh, service).leave(deadline_s=0.0)


async def freeze(mesh: Cast, service: Service) -> None:
    player = find(mesh, service)
    player.freeze()
    await mesh.until(lambda: is_given_up(mesh, player))
    if service is Service.SCHEDULER:
        await mesh.until(lambda: num_resubmitted(mesh) > 0)
    await asyncio.sleep(1.0)  # the others go on without it
    player.thaw()


def is_given_up(mesh: Cast, player: Player) -> bool:
    """Whether nobody who listens to beats counts on it any more."""
    instance_id = player.actor.identity.instance_id
    others: list[Any] = [one.actor for service in Service for one in mesh.of(service) if one is not player]
    known = [one.mesh.directory if isinstance(one, Gateway) else getattr(one, "_directory", None) for one in others]
    return all(directory.get(instance_id) is None for directory in known if directory is not None)


def check_times(streamed: list[Streamed], excused_s: float) -> None:
    """The times that are told are those of the whole request, however many schedulers have had it."""
    for stream in streamed:
        assert stream.end is not None
        timing, seen_s = stream.end["timing"], stream.ended_at - stream.accepted_at - excused_s
        assert timing["total_s"] > seen_s - 0.5, "the client saw more than half a second that nobody accounts for"
        assert timing["queue_s"] <= timing["first_token_s"] <= timing["total_s"]


def num_resubmitted(mesh: Cast) -> int:
    """How often requests were given to another scheduler."""
    gateways = [player.actor for player in mesh.of(Service.GATEWAY)]
    return sum(gateway.mesh.requests.handover.num_resubmitted for gateway in gateways if isinstance(gateway, Gateway))


Trouble = Callable[[Cast, Service], Awaitable[None]]


@pytest.mark.parametrize("trouble", [kill, leave, freeze])
@pytest.mark.parametrize("service", [Service.SCHEDULER, Service.DETOKENIZER, Service.EXECUTOR])
@pytest.mark.parametrize(("connect", "num_tokens"), [("memory", 100), ("nats", 1500)], indirect=["connect"])
async def test_streams_go_on_as_if_nothing_had_been(
    mesh: Cast, trouble: Trouble, service: Service, num_tokens: int
) -> None:
    bodies, expected = await undisturbed(mesh)

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, num_tokens)
        open_streams.extend(stream for stream in streamed if stream.end is None)
        await trouble(mesh, service)

    open_streams: list[Streamed] = []
    async with Standstills() as standstills:
        streamed = await mesh.stream_all(bodies, disturb)
    assert len(open_streams) > 3, "there was nothing to disturb any more"
    check_same(bodies, streamed, expected)
    if service is Service.SCHEDULER:
        assert num_resubmitted(mesh) > 0
        check_times(streamed, standstills.total_s)


async def test_a_scheduler_that_drains_hands_over_at_once_and_new_requests_are_served(mesh: Cast) -> None:
    bodies, expected = await undisturbed(mesh)
    new: list[None] = []

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        leaving = asyncio.create_task(find(mesh, Service.SCHEDULER).leave(deadline_s=60.0))
        while not leaving.done():
            check_same(bodies[:1], await mesh.stream_all(bodies[:1]), expected[:1])
            new.append(None)
        await leaving

    streamed = await mesh.stream_all(bodies, disturb)
    check_same(bodies, streamed, expected)
    assert num_resubmitted(mesh) > 3, "what ran was not waited for"
    assert new, "some came while hands changed"


@pytest.mark.parametrize("away_s", [0.0, 4.0])
async def test_streams_survive_a_restart_of_the_broker(
    folder: Path, runners: list[ModelRunner], private_nats_server: NatsServer, away_s: float
) -> None:
    """A short absence and one that is longer than it takes to give somebody up."""
    private_nats_server.start()

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        private_nats_server.stop()
        await asyncio.sleep(away_s)
        await asyncio.to_thread(private_nats_server.start)

    async with cast(folder, runners, lambda name: NatsTransport(private_nats_server.url, name=name)) as mesh:
        bodies, expected = await undisturbed(mesh)
        streamed = await mesh.stream_all(bodies, disturb)
        check_same(bodies, streamed, expected)
        assert num_resubmitted(mesh) == 0, "nobody was given up"
        await mesh.until_nothing_is_left()


async def test_streams_survive_a_broker_that_stands_still(
    folder: Path, runners: list[ModelRunner], private_nats_server: NatsServer
) -> None:
    """Nobody hears anybody, and nobody knows why: all give all others up, and then find them again."""
    private_nats_server.start()

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        private_nats_server.freeze()
        await asyncio.sleep(3.0)
        private_nats_server.thaw()

    async with cast(folder, runners, lambda name: NatsTransport(private_nats_server.url, name=name)) as mesh:
        bodies, expected = await undisturbed(mesh)
        streamed = await mesh.stream_all(bodies, disturb)
        check_same(bodies, streamed, expected)
        await mesh.until_nothing_is_left()


async def follow_until_cut_off(mesh: Cast, bodies: list[dict[str, Any]], disturb: Disturbance) -> list[Streamed]:
    """What had come of requests when their connection broke."""
    streamed = [Streamed() for _ in bodies]
    disturbing = asyncio.create_task(disturb(streamed))
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream", max_msg_size=0) as socket:
        for number, body in enumerate(bodies):
            await socket.send_json(create(number, body))
        with pytest.raises(Disconnected):
            await follow(socket, streamed)
    await disturbing
    return streamed


@pytest.mark.parametrize("trouble", [kill, leave])
async def test_clients_of_a_gateway_that_is_gone_go_on_at_another_one(mesh: Cast, trouble: Trouble) -> None:
    bodies, expected = await undisturbed(mesh)

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        await trouble(mesh, Service.GATEWAY)

    streamed = await follow_until_cut_off(mesh, bodies, disturb)
    assert sum(stream.end is None for stream in streamed) > 3
    await mesh.resume_all(streamed)
    check_same(bodies, streamed, expected)


async def test_streams_survive_the_loss_of_their_scheduler_and_then_of_their_gateway(mesh: Cast) -> None:
    """What the second gateway tells, log-probabilities included, the second scheduler has from the first gateway."""
    bodies, expected = await undisturbed(mesh)

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        await find(mesh, Service.SCHEDULER).leave(deadline_s=0.0)
        before = sum(stream.num_tokens for stream in streamed)
        await until_begun(streamed, before + 50)
        await find(mesh, Service.GATEWAY).kill()

    streamed = await follow_until_cut_off(mesh, bodies, disturb)
    assert sum(stream.end is None for stream in streamed) > 3
    await mesh.resume_all(streamed)
    check_same(bodies, streamed, expected)


async def test_streams_survive_a_gateway_that_dies_before_it_has_taken_them_elsewhere(mesh: Cast) -> None:
    """Their scheduler has let them go, and no other one has them yet."""
    bodies, expected = await undisturbed(mesh)
    leaving: list[asyncio.Task[None]] = []

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        gateway, scheduler = find(mesh, Service.GATEWAY), find(mesh, Service.SCHEDULER)
        released = asyncio.Event()

        async def hear(_message: RequestReleased) -> None:
            released.set()

        gateway.actor.mesh.given_back = hear  # type: ignore[attr-defined]
        leaving.append(asyncio.create_task(scheduler.leave(deadline_s=60.0)))
        await asyncio.wait_for(released.wait(), 20)
        await gateway.kill()

    streamed = await follow_until_cut_off(mesh, bodies, disturb)
    assert sum(stream.end is None for stream in streamed) > 3
    await mesh.resume_all(streamed)
    check_same(bodies, streamed, expected)
    await asyncio.wait_for(leaving[0], 20)


async def test_a_gateway_that_asks_late_takes_nothing_from_the_one_that_its_client_went_on_to(mesh: Cast) -> None:
    """The client asks one gateway, whose question stays on its way, loses patience, and is served by another one."""
    bodies, expected = await undisturbed(mesh)
    await mesh.add(Service.GATEWAY)

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        await find(mesh, Service.GATEWAY).kill()

    streamed = await follow_until_cut_off(mesh, bodies, disturb)
    held_up, send = hold_up_questions(find(mesh, Service.GATEWAY))
    async with mesh.session.ws_connect(f"{mesh.url()}/v1/stream") as socket:
        for number, stream in enumerate(streamed):
            if stream.end is None:
                await socket.send_json(resume(number, stream))
        await mesh.until(lambda: len(held_up) >= sum(stream.end is None for stream in streamed) > 3)
    num_before = sum(stream.num_tokens for stream in streamed)

    async def ask_late() -> None:
        await mesh.until(lambda: sum(stream.num_tokens for stream in streamed) > num_before + 100)
        await send(held_up)

    asking = asyncio.create_task(ask_late())
    await mesh.resume_all(streamed, gateway=1)
    await asking
    check_same(bodies, streamed, expected)


def hold_up_questions(gateway: Player) -> tuple[list[Outgoing], Callable[[list[Outgoing]], Awaitable[None]]]:
    """Keep what a gateway asks all schedulers from now on; that, and what sends it."""
    held_up: list[Outgoing] = []
    mesh = gateway.actor.mesh  # type: ignore[attr-defined]
    publish, look_for = mesh.publish, mesh.adoptions.look_for

    def hold_up(*arguments: Any) -> Any:
        answer, outgoing = look_for(*arguments)
        held_up.extend(outgoing)
        return answer, []

    mesh.adoptions.look_for = hold_up
    return held_up, publish


async def test_a_request_can_be_read_again_after_its_end(mesh: Cast) -> None:
    bodies, expected = await undisturbed(mesh)
    streamed = await mesh.stream_all(bodies)
    await mesh.until_nothing_is_left()
    await find(mesh, Service.GATEWAY).kill()
    again = [Streamed(stream.request_id) for stream in streamed]
    await mesh.resume_all(again)
    check_same(bodies, again, expected)


async def test_two_that_die_at_once_cost_a_pause(mesh: Cast) -> None:
    bodies, expected = await undisturbed(mesh)

    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed, 300)
        players = [find(mesh, service) for service in (Service.DETOKENIZER, Service.EXECUTOR, Service.SCHEDULER)]
        await asyncio.gather(*(player.kill() for player in players))

    streamed = await mesh.stream_all(bodies, disturb)
    check_same(bodies, streamed, expected)


async def test_a_request_whose_scheduler_and_gateway_die_at_once_ends_in_one_typed_failure_at_each_question(
    folder: Path, runners: list[ModelRunner]
) -> None:
    """Nobody has its prompt any more. That is certain only when no scheduler may come back that was but frozen."""
    broker = MemoryBroker()
    config = GatewayConfig(port=0, failover_timeout_s=3.0)
    async with cast(folder, runners, lambda _: MemoryTransport(broker), gateway=config) as mesh:
        bodies, expected = await undisturbed(mesh)

        async def disturb(streamed: list[Streamed]) -> None:
            await until_begun(streamed, 300)
            await asyncio.gather(find(mesh, Service.SCHEDULER).kill(), find(mesh, Service.GATEWAY).kill())

        streamed = await follow_until_cut_off(mesh, bodies, disturb)
        lost = [stream for stream in streamed if stream.end is None]
        assert len(lost) > 3
        codes: list[set[str]] = []
        while codes[-1:] != [{"not_found"}]:
            async with Standstills() as standstills:
                ends, seconds = await resume_and_fail(mesh, lost)
            codes.append({end["error"]["code"] for end in ends})
            assert seconds < config.adopt_timeout_s + 1.0 + standstills.total_s
            assert len(codes) < 10
        assert codes[0] == {"unavailable"}, "it was just lost"
        (new,) = await mesh.stream_all(bodies[:1])
        check_same(bodies[:1], [new], expected[:1])
        await mesh.until_nothing_is_left()


async def resume_and_fail(mesh: Cast, streamed: list[Streamed]) -> tuple[list[dict[str, Any]], float]:
    """What a client is told that asks for lost requests, and how long that takes."""
    began = time.monotonic()
    asked = [Streamed(stream.request_id, stream.text, stream.token_ids) for stream in streamed]
    await mesh.resume_all(asked)
    ends = [stream.end for stream in asked if stream.end is not None and stream.end["type"] == "request.failed"]
    assert len(ends) == len(streamed)
    return ends, time.monotonic() - began


def count_tokens(mesh: Cast) -> int:
    """What all schedulers have generated."""
    return sum(one.status.num_output_tokens for one in mesh.of(Service.SCHEDULER))


async def test_a_request_whose_client_does_not_come_back_is_cancelled(folder: Path, runners: list[ModelRunner]) -> None:
    broker = MemoryBroker()
    grace = {"gateway": GatewayConfig(port=0, resume_grace_s=0.5), "scheduler": SchedulerConfig(orphan_grace_s=0.5)}
    body = {"prompt": TEXT, "max_tokens": 1500, "n": 16, "ignore_eos": True}
    async with cast(folder, runners, lambda _: MemoryTransport(broker), **grace) as mesh:  # type: ignore[arg-type]
        num_before = 0
        for trouble in ("connection", "gateway"):
            streamed = [Streamed()]
            socket = await mesh.session.ws_connect(f"{mesh.url()}/v1/stream")
            await socket.send_json(create(0, body))
            following = asyncio.create_task(follow(socket, streamed))
            await until_begun(streamed, 1)
            if trouble == "gateway":
                await find(mesh, Service.GATEWAY).kill()
            else:
                assert socket._response.connection is not None
                assert socket._response.connection.transport is not None
                socket._response.connection.transport.abort()
            with pytest.raises(Disconnected):
                await following
            await mesh.until_nothing_is_left()
            num_tokens, num_before = count_tokens(mesh) - num_before, count_tokens(mesh)
            assert num_tokens < 16 * 1500, "it was stopped, not finished"
