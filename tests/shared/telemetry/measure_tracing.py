"""What following requests costs: `python -m tests.shared.telemetry.measure_tracing`.

Each service's collaborator is given what its service gives it for one request, or for one step in which outputs go on,
with spans kept, with spans kept and offered to an exporter, and with nothing followed. What an exporter's thread does
with a span is measured by itself.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.detokenizer.spans import DetokenizerSpans
from services.executor.spans import StepSpans
from services.executor.step_thread import StepFinished
from services.gateway.chat import chat_draft
from services.gateway.open_request import OpenRequest
from services.gateway.spans import GatewaySpans
from services.gateway.streams import End, Stream
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.spans import SchedulerSpans
from services.scheduler.streams import Stream as SchedulerStream
from services.tokenizer.answers import refusal
from services.tokenizer.spans import TokenizerSpans
from shared.clock import SystemClock
from shared.errors import Unavailable
from shared.ids import InstanceId, RequestId, new_request_id
from shared.messages import (
    Attributes,
    ExecutorCapacity,
    Outcome,
    RequestClosed,
    RequestOpened,
    SlotAssignment,
    Span,
    StepPlan,
    StepResult,
    SubmitRequest,
    SubmitTokens,
    TextOptions,
    TextPrompt,
    TraceContext,
    Usage,
    int32s,
)
from shared.sampling import SamplingParams
from shared.telemetry.otlp import OtlpSender
from shared.telemetry.otlp_settings import OtlpSettings
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Tracing, new_span_id, new_trace_id

GATEWAY, SCHEDULER, EXECUTOR = InstanceId("gateway-1"), InstanceId("scheduler-1"), InstanceId("executor-1")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100, "stream": True}
USAGE = Usage(200, 100, (100,))


class _Sink:
    """An exporter that takes everything at once."""

    num_dropped = 0

    def offer(self, span: Span) -> None:
        pass

    def close(self, within_s: float) -> None:
        pass


WAYS: dict[str, Callable[[], Tracing]] = {
    "off": Tracing,
    "kept": lambda: Tracing(SpanStore(1000), sample_ratio=1.0),
    "kept and exported": lambda: Tracing(SpanStore(1000), _Sink(), sample_ratio=1.0),
}
"""What a process may do about spans."""


def context(tracing: Tracing) -> TraceContext | None:
    """What comes with a request, as the gateway would have it."""
    return TraceContext(new_trace_id(), new_span_id(), is_sampled=True) if tracing.is_on else None


def per_call_us(call: Callable[[], Any], num_calls: int) -> float:
    """The least of five rounds, in microseconds for each call: what else happens only adds to it."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(num_calls):
            call()
        rounds.append((time.perf_counter() - began) / num_calls * 1e6)
    return min(rounds)


# One request.


def gateway_request(tracing: Tracing) -> Callable[[], None]:
    """From a body to the last word of a stream."""
    spans, draft = GatewaySpans(tracing), chat_draft(dict(CHAT))
    spans.address = "127.0.0.1", 8000
    submission = _submit_request(None)

    def run() -> None:
        request_id = new_request_id()
        spans.begin(request_id, "chat", None)
        spans.asked(request_id, draft, "default")
        stream = Stream(request_id, 1)
        request = OpenRequest(stream, submission, SCHEDULER, 0.0, 0.0)
        spans.admitted([stream], "")
        spans.attached([stream])
        stream.told(1)
        spans.taken(request)
        stream.close(End(Outcome.COMPLETED, USAGE))
        spans.ended(request)
        spans.left([stream])

    return run


def tokenizer_request(tracing: Tracing) -> Callable[[], None]:
    """From a prompt to its answer."""
    spans, question = TokenizerSpans(tracing), _submit_request(context(tracing))
    given = refusal(question, Unavailable("No."))

    def run() -> None:
        spans.began(question)
        spans.ended(given)

    return run


def scheduler_request(tracing: Tracing) -> Callable[[], None]:
    """From a submission to its end, with one step for the prompt."""
    clock, fleet = SystemClock(), _fleet()
    spans = SchedulerSpans(tracing, fleet, clock)
    trace = context(tracing)

    def run() -> None:
        request_id = new_request_id()
        stream = _scheduler_stream(request_id, trace)
        spans.opened(stream)
        plan = StepPlan(1, released=int32s([0]), assigned=(_assignment(0, request_id, None),), slots=int32s([0]))
        spans.planned(EXECUTOR, _with_rows(plan, 1, 200))
        stream.first_step_at = clock.now()
        spans.started(stream)
        stream.first_token_at = clock.now()
        spans.completed(EXECUTOR, StepResult(1, int32s([5]), duration_s=0.005))
        spans.closed(stream, RequestClosed(request_id, Outcome.COMPLETED, USAGE))

    return run


def detokenizer_request(tracing: Tracing) -> Callable[[], None]:
    """From the opening to the end."""
    spans, request_id = DetokenizerSpans(tracing), new_request_id()
    opened = RequestOpened(request_id, SCHEDULER, GATEWAY, "tiny", TextOptions(), 1, trace=context(tracing))

    def run() -> None:
        spans.opened(opened)
        spans.ended(request_id, 100, Outcome.COMPLETED)

    return run


# One step in which outputs go on.


def scheduler_step(tracing: Tracing, num_rows: int) -> Callable[[], None]:
    """A plan on its way out, and its result."""
    spans = SchedulerSpans(tracing, _fleet(), SystemClock())
    trace = context(tracing)
    assigned = []
    for slot in range(num_rows):
        request_id = new_request_id()
        spans.opened(_scheduler_stream(request_id, trace))
        assigned.append(_assignment(slot, request_id, None))
    prompts = StepPlan(1, assigned=tuple(assigned), slots=int32s(range(num_rows)))
    spans.planned(EXECUTOR, _with_rows(prompts, num_rows, 200))
    plan = _with_rows(StepPlan(2, slots=int32s(range(num_rows))), num_rows, 1)
    result = StepResult(2, int32s([5] * num_rows), duration_s=0.005)

    def run() -> None:
        spans.planned(EXECUTOR, plan)
        spans.completed(EXECUTOR, result)

    return run


def executor_step(tracing: Tracing, num_rows: int) -> Callable[[], None]:
    """A plan that comes in, and its result."""
    spans, trace = StepSpans(tracing), context(tracing)
    assigned = tuple(_assignment(slot, new_request_id(), trace) for slot in range(num_rows))
    spans.planned(1, StepPlan(1, assigned=assigned, slots=int32s(range(num_rows))))
    plan = StepPlan(2, slots=int32s(range(num_rows)))
    finished = StepFinished(
        1, num_rows, StepResult(2, int32s([5] * num_rows), duration_s=0.005), num_rows, time.time_ns()
    )

    def run() -> None:
        spans.planned(1, plan)
        spans.finished(finished)

    return run


REQUESTS = {
    "gateway": gateway_request,
    "tokenizer": tokenizer_request,
    "scheduler": scheduler_request,
    "detokenizer": detokenizer_request,
}
STEPS = {"scheduler": scheduler_step, "executor": executor_step}


def _submit_request(trace: TraceContext | None) -> SubmitRequest:
    sampling = SamplingParams(seed=1)
    prompt = TextPrompt("Hi")
    return SubmitRequest(new_request_id(), GATEWAY, SCHEDULER, "tiny", "acme", prompt, sampling, trace=trace)


def _scheduler_stream(request_id: RequestId, trace: TraceContext | None) -> SchedulerStream:
    sampling = SamplingParams(seed=1)
    request = Request(request_id, int32s([1]), sampling, arrival=0, max_tokens=100)
    submission = SubmitTokens(
        request_id, GATEWAY, "tiny", "acme", int32s([1]), sampling, TextOptions(), 1, 100, trace=trace
    )
    opened = RequestOpened(request_id, SCHEDULER, GATEWAY, "tiny", TextOptions(), 1)
    return SchedulerStream(request, submission, opened, time.monotonic())


def _assignment(slot: int, request_id: RequestId, trace: TraceContext | None) -> SlotAssignment:
    return SlotAssignment(slot, request_id, 0, int32s([1] * 200), 200, SamplingParams(seed=1), int32s([1]), trace)


def _with_rows(plan: StepPlan, num_rows: int, count: int) -> StepPlan:
    """The plan with so many tokens for each row, which samples."""
    return StepPlan(
        plan.step_id,
        released=plan.released,
        assigned=plan.assigned,
        slots=plan.slots,
        starts=int32s([0] * num_rows),
        counts=int32s([count] * num_rows),
        num_new_blocks=int32s([0] * num_rows),
        sampled_rows=int32s(range(num_rows)),
    )


def _fleet() -> Fleet:
    config = SchedulerConfig()

    def make(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
        return config.settings_for(capacity, max_plan_bytes=1 << 20).make_scheduler(capacity, shares)

    return Fleet(make)


def export_us(num_links: int) -> float:
    """What a span with so many links costs the thread that exports it, sending apart."""
    sender = OtlpSender(OtlpSettings("http://127.0.0.1:9"), {"service.name": "shoal-executor"}, "0")
    above = TraceContext(new_trace_id(), new_span_id(), is_sampled=True)
    said: Attributes = {f"shoal.number.{number}": number for number in range(6)}
    batch = [Span(new_request_id(), "step", new_span_id(), above, 1, 2, said, links=(above,) * num_links)] * 100
    return per_call_us(lambda: sender.encode(batch), 2) / len(batch)


@dataclass(frozen=True)
class Cost:
    """One line of the report."""

    what: str
    way: str
    us: float


def measure(num_calls: int = 2000) -> list[Cost]:
    """All lines."""
    costs = []
    for way, make in WAYS.items():
        costs += [Cost(f"request, {name}", way, per_call_us(run(make()), num_calls)) for name, run in REQUESTS.items()]
        for num_rows in (1, 32, 256):
            costs += [
                Cost(f"step of {num_rows}, {name}", way, per_call_us(run(make(), num_rows), num_calls))
                for name, run in STEPS.items()
            ]
    return costs


if __name__ == "__main__":
    found = measure()
    print(f"{'microseconds':<28}" + "".join(f"{way:>20}" for way in WAYS))
    for what in dict.fromkeys(cost.what for cost in found):
        print(f"{what:<28}" + "".join(f"{cost.us:>20.2f}" for cost in found if cost.what == what))
    for num_links in (0, 1, 32):
        print(f"{f'exporting, {num_links} links':<28}{export_us(num_links):>20.2f}")
