"""The page of a gateway's metrics, and what stands on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.telemetry.metering import MetricsSettings, metering
from tests.gateway.fake_mesh import FakeRequest
from tests.gateway.harness import Harness
from tests.shared.telemetry.scrape import Page

LABELS = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "shoal", "gen_ai_request_model": "test/model-1"}
TTFT, TPOT, DURATION = (
    f"gen_ai_server_{name}_seconds" for name in ("time_to_first_token", "time_per_output_token", "request_duration")
)


@asynccontextmanager
async def measured(harness: Harness) -> AsyncIterator[None]:
    async with metering(harness.gateway, MetricsSettings()):
        yield


async def scrape(harness: Harness, **headers: str) -> Page:
    async with harness.http.get(f"{harness.url}/metrics", headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Page(await response.text())


def endings(page: Page) -> dict[tuple[str, str, str], float]:
    """How many requests ended how: by operation, ending and code."""
    return {
        (sample.labels["operation"], sample.labels["ending"], sample.labels["code"]): sample.value
        for sample in page.families["shoal_gateway_requests"].samples
    }


async def say_after(harness: Harness, seconds: float, request: FakeRequest, text: str, **piece: Any) -> None:
    """Let time pass, and text arrive."""
    harness.clock.advance(seconds)
    await request.say(text, **piece)
    await harness.settle()
