"""What metrics cost: run by hand, `python -m tests.shared.telemetry.measure_cost`, asserted nowhere.

Prints the best of several rounds, since a busy machine only adds to it.
"""

import asyncio
import io
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from services.executor.metrics import ExecutorMetrics
from services.gateway.accounts import account_of, record
from services.gateway.metrics import GatewayMetrics
from services.gateway.open_request import OpenRequest
from services.gateway.streams import End, Stream
from services.scheduler.metrics import SchedulerMetrics
from shared import log as logs
from shared.clock import SystemClock
from shared.ids import InstanceId, RequestId
from shared.messages import (
    ChatPrompt,
    ChoiceText,
    FinishReason,
    Outcome,
    StepCompleted,
    StepResult,
    SubmitRequest,
    Usage,
    int32s,
)
from shared.sampling import SamplingParams
from shared.telemetry.metrics import Histogram, Instrument, Kind, Reading, snapshot
from shared.telemetry.metrics_text import render
from shared.transport.protocol import Traffic

_ROUNDS = 7


def best_us(work: Callable[[], object], times: int) -> float:
    """Microseconds that one call takes, in the best round."""
    rounds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - began) / times)
    return min(rounds) * 1e6


def tell(what: str, work: Callable[[], object], *, times: int = 20_000) -> None:
    """Print what something takes."""
    print(f"{what:<62} {best_us(work, times):8.2f} µs")


def ended_request() -> tuple[OpenRequest, End]:
    """A request of 200 tokens that is about to end."""
    request_id, gateway_id = RequestId("req-1"), InstanceId("gateway-1")
    spec = SubmitRequest(
        request_id, gateway_id, InstanceId("s"), "model", "acme", ChatPrompt(()), SamplingParams(seed=0)
    )
    stream = Stream(request_id, 1)
    stream.accept()
    stream.append(ChoiceText(request_id, 0, 0, int32s(range(200)), 0, "text", FinishReason.STOP))
    request = OpenRequest(stream, spec, InstanceId("s"), 0.0, 0.0, first_token_at=0.1)
    return request, End(Outcome.COMPLETED, Usage(30, 16, (200,)))


def measure_recording() -> None:
    """What is paid as things happen."""
    plain, labelled = Histogram("a", "s", "a", _BOUNDS), Histogram("b", "s", "b", _BOUNDS, ("model", "kind"))
    tell("a value in a histogram", lambda: plain.record(0.013))
    tell("a value in a histogram with two labels", lambda: labelled.record(0.013, "model", "kind"))
    executor, result = ExecutorMetrics(), StepResult(1, int32s(range(16)), duration_s=0.005)
    tell("a step at the executor", lambda: executor.step_took(16, 16, result))
    scheduler, clock = SchedulerMetrics(), SystemClock()

    def step_at_scheduler() -> None:
        began = clock.now()
        scheduler.plan.record(clock.now() - began)
        began = clock.now()
        scheduler.num_unused_tokens += len(result.token_ids) - len(result.failures) - 16
        scheduler.apply.record(clock.now() - began)

    tell("a step at the scheduler", step_at_scheduler)
    traffic, handled, payload = Traffic(), defaultdict[type, int](int), b"x" * 500

    def message() -> None:
        traffic.received(payload)
        handled[StepCompleted] += 1

    tell("a message received and handled", message)
    request, end = ended_request()
    gateway = GatewayMetrics()

    def request_at_gateway() -> None:
        gateway.request_opened("chat")
        gateway.first_token(request, "chat", 0.1)
        gateway.request_ended(account_of(request, end, 1.0))

    tell("a request at the gateway", request_at_gateway)
    logs.configure(name="gateway-1", level="info", style="json", stream=io.StringIO())
    account = account_of(request, end, 1.0)
    tell("its line in the log", lambda: record(account), times=3000)
    logging.getLogger().handlers.clear()


_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def busy_instruments(num_series: int) -> list[Instrument]:
    """As many metrics as a gateway has, with so many series each."""
    histograms = [Histogram(f"h{number}", "s", "h", _BOUNDS, ("model", "operation")) for number in range(6)]
    for histogram in histograms:
        for series in range(num_series):
            histogram.record(0.1, f"model-{series}", "chat")
    counts: dict[Any, float] = {(f"tenant-{series}", "completed"): 1 for series in range(num_series)}
    labels = ("tenant", "ending")
    return [
        *histograms,
        *(Reading(f"r{number}", Kind.COUNTER, "1", "r", lambda: counts, labels) for number in range(30)),
    ]


def measure_scraping(num_series: int) -> None:
    """What is paid when somebody reads them."""
    instruments, resource = busy_instruments(num_series), {"service.name": "shoal"}
    taken = snapshot(instruments)
    size = len(render(taken, resource)[0])
    tell(f"a snapshot of {size >> 10} KiB, on the event loop", lambda: snapshot(instruments), times=300)
    tell(f"a page of {size >> 10} KiB, in a thread", lambda: render(taken, resource), times=20)


async def measure_lag(*, is_scraped: bool) -> None:
    """How late timers of the event loop are while pages are made without a pause."""
    instruments, lags = busy_instruments(3), []
    sys.setswitchinterval(0.001)

    async def scrape_for_ever() -> None:
        while True:
            await asyncio.to_thread(render, snapshot(instruments), {"service.name": "shoal"})

    scraping = asyncio.create_task(scrape_for_ever()) if is_scraped else None
    for _ in range(500):
        asked_at = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - asked_at - 0.005)
    if scraping is not None:
        scraping.cancel()
    lags.sort()
    what = "while pages are made all the time" if is_scraped else "without"
    print(f"lag of the event loop {what:<40} {lags[250] * 1e6:8.0f} µs in the middle, {lags[495] * 1e6:.0f} at 99 %")


def measure_opentelemetry() -> None:
    """The same histogram in OpenTelemetry's SDK, for comparison."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    histogram = provider.get_meter("x").create_histogram("a", explicit_bucket_boundaries_advisory=list(_BOUNDS))
    labels = {"model": "model", "kind": "kind"}
    tell("a value in a histogram of OpenTelemetry's SDK", lambda: histogram.record(0.013, labels), times=5000)


if __name__ == "__main__":
    measure_recording()
    measure_opentelemetry()
    measure_scraping(3)
    measure_scraping(30)
    asyncio.run(measure_lag(is_scraped=False))
    asyncio.run(measure_lag(is_scraped=True))
