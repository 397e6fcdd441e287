"""The numbers of all services add up: every request is counted once, and every token is somebody's.

Read as an operator reads them: from each service's page, over HTTP, parsed as Prometheus does.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from services.executor.config import ExecutorConfig
from services.executor.model_runner import ModelRunner
from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from shared.actor import Actor
from shared.codec import Decoder
from shared.ids import Service
from shared.messages import USAGE_LEDGER, UsageRecord
from shared.telemetry.metering import Metering, MetricsSettings, metering
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.integration.cast import Cast, Disconnected, Player, Streamed, cast
from tests.integration.in_process import FewBlocks, InProcessMesh, in_process_mesh, load_runner
from tests.integration.mixed_load import (
    GREEDY,
    PATIENCE_S,
    Client,
    Ending,
    flood,
    mixed_load,
    refused_at_the_door,
    resume_in_the_middle,
    stops,
)
from tests.shared.telemetry.scrape import Page, read, scrape


@pytest.fixture(scope="module")
def runners(folder: Path) -> list[ModelRunner]:
    return [load_runner(folder, ExecutorConfig(max_slots=8, threads=1, kv_cache_mb=32)) for _ in range(2)]


class Pages:
    """The metrics of every service of a mesh at one moment."""

    def __init__(self, by_service: dict[Service, Page]) -> None:
        self.gateway = by_service[Service.GATEWAY]
        self.tokenizer = by_service[Service.TOKENIZER]
        self.scheduler = by_service[Service.SCHEDULER]
        self.executor = by_service[Service.EXECUTOR]
        self.detokenizer = by_service[Service.DETOKENIZER]

    @property
    def endings(self) -> dict[Ending, float]:
        """What the gateway counted."""
        samples = self.gateway.families["shoal_gateway_requests"].samples
        return {(each.labels["operation"], each.labels["ending"], each.labels["code"]): each.value for each in samples}


async def shown(stack: AsyncExitStack, actors: Sequence[Actor[Any]]) -> dict[Service, Metering]:
    """Has each service show its metrics on a port of its own."""
    return {
        actor.identity.service: await stack.enter_async_context(metering(actor, MetricsSettings(port=0)))
        for actor in actors
    }


def records_of(broker: MemoryBroker) -> list[UsageRecord]:
    """What is kept of the usage of requests."""
    decoder = Decoder[UsageRecord](UsageRecord)
    return [decoder.decode(payload) for payload in broker.ledgers[USAGE_LEDGER].payloads.values()]


TTFT, TPOT, DURATION = (
    f"gen_ai_server_{name}_seconds" for name in ("time_to_first_token", "time_per_output_token", "request_duration")
)
OUTPUT_TOKENS = "shoal_scheduler_output_tokens"


class Trial:
    """One mesh whose services show their metrics, and what its clients saw."""

    def __init__(self, mesh: InProcessMesh, shown: dict[Service, Metering], client: Client) -> None:
        self.mesh = mesh
        self.client = client
        self._shown = shown

    async def pages(self) -> Pages:
        """The metrics when nothing is on its way any more."""
        await self.mesh.until_idle()
        async with asyncio.timeout(PATIENCE_S):
            while self.mesh.gateway.status().num_unrecorded:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return Pages({service: await scrape(made.address) for service, made in self._shown.items()})


@pytest.fixture
async def trial(folder: Path, runners: list[ModelRunner]) -> AsyncIterator[Trial]:
    """A mesh with few blocks and a short queue, so that choices are preempted and requests refused."""
    gateway, scheduler = GatewayConfig(port=0, max_body_bytes=64 << 10), SchedulerConfig(max_waiting_requests=40)
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(
            in_process_mesh(folder, FewBlocks(runners[0], 42), gateway=gateway, scheduler=scheduler)
        )
        made = await shown(stack, mesh.actors)
        socket = await stack.enter_async_context(mesh.session.ws_connect(f"{mesh.url}/v1/stream", max_msg_size=0))
        yield Trial(mesh, made, Client(socket))


async def test_every_request_and_every_token_is_counted_once(trial: Trial) -> None:
    mesh, client = trial.mesh, trial.client
    stop = await stops(mesh)
    at_the_door = await refused_at_the_door(mesh)
    await mixed_load(mesh, client, stop)
    await flood(client)
    num_resumed_tokens = await resume_in_the_middle(mesh)
    pages = await trial.pages()
    gateway, scheduler, executor = pages.gateway, pages.scheduler, pages.executor
    records = records_of(mesh.broker)

    # Requests: what clients saw, and what the gateway counted.
    elsewhere = Counter({("text_completion", "completed", ""): 2, ("text_completion", "cancelled", ""): 1})
    expected = client.endings + at_the_door + elsewhere  # the greedy one, the resumed one, the one whose client left
    assert pages.endings == expected
    codes = {code for _, ending, code in expected if ending == "refused"}
    assert {"queue_full", "context_length_exceeded", "model_not_found", "invalid_value"} <= codes
    assert {ending for _, ending, _ in expected} == {"completed", "failed", "cancelled", "refused"}
    opened = gateway.total("shoal_gateway_requests_opened_total")
    assert opened == sum(expected.values()) - sum(at_the_door.values())
    assert gateway.value("shoal_gateway_requests_open") == 0
    assert gateway.total(f"{DURATION}_count") == gateway.total("shoal_gateway_tenant_requests_total") == opened

    # The same requests at the scheduler and the tokenizer.
    by_ending: Counter[str] = Counter()
    for (_, ending, _), count in (expected - at_the_door).items():
        by_ending[ending] += count
    at_scheduler = scheduler.by("shoal_scheduler_requests_total", "ending")
    assert {each: at_scheduler[each] for each in ("completed", "failed", "cancelled")} == {
        each: by_ending[each] for each in ("completed", "failed", "cancelled")
    }
    refused_by_tokenizer = pages.tokenizer.value("shoal_tokenizer_requests_total", kind="submit", result="refused")
    assert at_scheduler["refused"] + refused_by_tokenizer == by_ending["refused"]
    assert scheduler.value("shoal_scheduler_requests_accepted_total") == opened - by_ending["refused"] == len(records)
    assert pages.detokenizer.total("shoal_detokenizer_requests_total") >= len(records)

    # Output tokens: what clients got, what was billed, what was counted, and what was computed.
    billed = sum(sum(record.usage.num_output_tokens) for record in records)
    delivered = gateway.total("shoal_gateway_request_tokens_sum", type="output")
    assert delivered == gateway.total("shoal_gateway_tenant_tokens_total", type="output") == billed
    of_completed = sum(sum(each.usage.num_output_tokens) for each in records if each.outcome == "completed")
    assert of_completed == client.num_completed_tokens + num_resumed_tokens + GREEDY["max_tokens"]
    assert of_completed < client.num_tokens + num_resumed_tokens + GREEDY["max_tokens"] <= delivered
    appended, cut, unused = (scheduler.value(f"{OUTPUT_TOKENS}{what}_total") for what in ("", "_cut", "_unused"))
    assert delivered == appended - cut
    assert executor.value("shoal_executor_tokens_sampled_total") == appended + unused
    assert cut + unused > 0, "nothing was computed after an end"
    assert scheduler.value("shoal_scheduler_preemptions_total") > 0, "nothing was computed twice"

    # Times.
    with_output = sum(sum(record.usage.num_output_tokens) > 0 for record in records)
    assert gateway.total(f"{TTFT}_count") == with_output < len(records), "none ended before its first token"
    with_rest = sum(each.outcome == "completed" and max(each.usage.num_output_tokens) > 1 for each in records)
    assert gateway.total(f"{TPOT}_count") == with_rest

    # Computed tokens, guesses, prompts.
    assert executor.value("shoal_executor_step_tokens_sum") == executor.value("shoal_executor_tokens_computed_total")
    assert executor.value("shoal_executor_step_duration_seconds_count") == scheduler.total(
        "shoal_scheduler_steps_total"
    )
    prompts = gateway.total("shoal_gateway_request_tokens_sum", type="input")
    begun = scheduler.total("shoal_scheduler_prompt_tokens_total")
    in_vain = sum(each.usage.num_prompt_tokens for each in records if not sum(each.usage.num_output_tokens))
    assert begun <= prompts <= begun + in_vain, "only a prompt that no step has seen is not counted there"
    assert 0 < scheduler.value("shoal_scheduler_prompt_tokens_total", source="cached") < begun


class Crowd:
    """A mesh with two of each service, all of whose metrics can be read, also of those that are gone."""

    def __init__(self, mesh: Cast, made: dict[Service, list[Metering]]) -> None:
        self.mesh = mesh
        self._made = made

    async def total(self, service: Service, name: str, **labels: str) -> float:
        """The sum over all that there ever were of a service."""
        pages = [await read(each.page) for each in self._made[service]]
        return sum(page.total(name, **labels) for page in pages)

    def find(self, service: Service) -> Player:
        """One that streams depend on."""
        if service is Service.SCHEDULER:
            return self.mesh.holder()
        if service is Service.DETOKENIZER:
            return max(self.mesh.of(service), key=lambda one: int(one.status.num_open_requests))
        holder_id = self.mesh.holder().actor.identity.instance_id
        return next(one for one in self.mesh.of(service) if one.status.held_by == holder_id)


@pytest.fixture
async def crowd(folder: Path, runners: list[ModelRunner]) -> AsyncIterator[Crowd]:
    broker = MemoryBroker()
    async with AsyncExitStack() as stack:
        mesh = await stack.enter_async_context(cast(folder, runners, lambda _name: MemoryTransport(broker)))
        made = {
            service: [await stack.enter_async_context(metering(player.actor, MetricsSettings())) for player in players]
            for service, players in mesh.players.items()
        }
        yield Crowd(mesh, made)


BODIES = [GREEDY | {"seed": number, "max_tokens": 150, "n": 1 + number % 2} for number in range(8)]


async def until_begun(streamed: list[Streamed]) -> None:
    """Return when every request has some tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while not all(each.num_tokens for each in streamed):  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def check_counted_once(crowd: Crowd, streamed: list[Streamed]) -> None:
    """Every request has one end, one first token, and the tokens that its client got."""
    gateways = Service.GATEWAY
    num_tokens = sum(each.num_tokens for each in streamed)
    assert num_tokens == sum(body["max_tokens"] * body["n"] for body in BODIES)
    assert await crowd.total(gateways, "shoal_gateway_requests_opened_total") == len(BODIES)
    assert await crowd.total(gateways, "shoal_gateway_requests_total") == len(BODIES)
    assert await crowd.total(gateways, "shoal_gateway_requests_total", ending="completed") == len(BODIES)
    assert await crowd.total(gateways, f"{TTFT}_count") == len(BODIES)
    assert await crowd.total(gateways, "shoal_gateway_request_tokens_sum", type="output") == num_tokens


@pytest.mark.parametrize("service", [Service.SCHEDULER, Service.DETOKENIZER, Service.EXECUTOR])
@pytest.mark.parametrize("is_sudden", [True, False], ids=["dies", "leaves"])
async def test_request_is_counted_once_whoever_is_lost_meanwhile(
    crowd: Crowd, service: Service, is_sudden: bool
) -> None:
    async def disturb(streamed: list[Streamed]) -> None:
        await until_begun(streamed)
        player = crowd.find(service)
        handing_over_s = 20.0 if service is Service.SCHEDULER else 0.0
        await (player.kill() if is_sudden else player.leave(handing_over_s))

    streamed = await crowd.mesh.stream_all(BODIES, disturb)
    assert all(each.end and each.end["type"] == "request.completed" for each in streamed)
    await crowd.mesh.until_nothing_is_left()
    await check_counted_once(crowd, streamed)
    if service is Service.SCHEDULER:
        assert await crowd.total(Service.GATEWAY, "shoal_gateway_resubmissions_total", reason="moved") > 0
        assert await crowd.total(Service.SCHEDULER, f"{OUTPUT_TOKENS}_resumed_total") > 0
    if service is Service.EXECUTOR:
        assert await crowd.total(Service.SCHEDULER, "shoal_scheduler_failovers_total") > 0
        assert await crowd.total(Service.SCHEDULER, "shoal_scheduler_executors_lost_total") > 0
    if service is not Service.SCHEDULER or not is_sudden:
        appended, cut, resumed, moved = [
            await crowd.total(Service.SCHEDULER, f"{OUTPUT_TOKENS}{what}_total")
            for what in ("", "_cut", "_resumed", "_moved")
        ]
        assert appended - cut + resumed - moved == sum(each.num_tokens for each in streamed)


async def test_request_that_goes_on_at_another_gateway_is_counted_once(crowd: Crowd) -> None:
    streamed: list[Streamed] = []

    async def disturb(so_far: list[Streamed]) -> None:
        streamed.extend(so_far)
        await until_begun(so_far)
        await crowd.mesh.of(Service.GATEWAY)[0].kill()

    with pytest.raises(Disconnected):
        await crowd.mesh.stream_all(BODIES, disturb)
    assert any(each.end is None for each in streamed)
    await crowd.mesh.resume_all(streamed)
    await crowd.mesh.until_nothing_is_left()
    await check_counted_once(crowd, streamed)
    assert await crowd.total(Service.GATEWAY, "shoal_gateway_resumptions_total", place="elsewhere") > 0
