"""The scheduler service: what it refuses, and with what advice."""

import pytest

from services.scheduler.config import SchedulerConfig
from shared.messages import (
    RequestAccepted,
    RequestRefused,
)
from tests.scheduler.harness import Mesh


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
