"""The scheduler service: settings that reach the core."""

import pytest

from services.scheduler.config import SchedulerConfig
from shared.messages import (
    RunStep,
)
from tests.scheduler.harness import Mesh


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
