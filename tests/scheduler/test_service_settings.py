"""The scheduler service: settings that reach the core."""

from dataclasses import replace
from random import Random

import pytest

from services.gateway.config import GatewayConfig
from services.scheduler.bench import SteadyDecode
from services.scheduler.config import SchedulerConfig
from services.scheduler.simulate.policies import SHOAL
from services.scheduler.simulate.step_times import CPU
from shared.messages import RunStep
from tests.scheduler.driver import make_capacity
from tests.scheduler.harness import EXECUTOR, Mesh


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


CONFIG = SchedulerConfig(
    max_step_tokens=50, max_chunk_tokens=7, target_itl_ms=40, max_slowdown=3.0, max_wait_tokens=123, prefix_cache=True
)


@pytest.mark.parametrize("mesh", [CONFIG], indirect=True)
async def test_service_and_simulator_plan_within_the_same_limits(mesh: Mesh) -> None:
    await mesh.ready()
    simulated = SHOAL.make_fleet(CONFIG, Random(0))
    simulated.add_executor(EXECUTOR, make_capacity())
    schedulers = [fleet.schedulers[EXECUTOR] for fleet in (mesh.service._fleet, simulated)]
    limits = schedulers[0].limits
    assert schedulers[1].limits == limits
    assert (limits.max_tokens, limits.max_chunk_tokens, limits.max_slowdown) == (50, 7, 3.0)
    assert limits.target_step_s == pytest.approx(0.04)
    assert limits.max_plan_bytes == mesh.transport.max_payload
    assert [scheduler.waiting.max_wait_tokens for scheduler in schedulers] == [123, 123]


def test_the_benchmark_plans_as_the_service_does_by_default_but_for_the_size_of_messages() -> None:
    (scheduler,) = SteadyDecode(2)._fleet.schedulers.values()
    expected = SchedulerConfig().settings_for(scheduler.capacity, max_plan_bytes=1 << 20).limits
    assert replace(scheduler.limits, max_plan_bytes=1 << 20) == expected


@pytest.mark.parametrize("num_outputs", [8, 64])
def test_who_waits_goes_by_age_long_before_its_gateway_gives_up(num_outputs: int) -> None:
    """On the slowest executor there is a measurement of, with contexts of 500 tokens."""
    times = CPU.step_times
    step_s = times.base_s + num_outputs * (times.row_s + 500 * times.context_token_s)
    wait_s = SchedulerConfig().max_wait_tokens * step_s / num_outputs
    assert wait_s < GatewayConfig().queue_timeout_s / 2
