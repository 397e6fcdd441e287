"""A request belongs to the trace of whoever asks, if OpenTelemetry says that there is one."""

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, TraceFlags, Tracer, TraceState, use_span

import shoal
from shared.messages import TraceContext
from shared.telemetry import w3c
from tests.client.fake_gateway import CHAT, Conversation, FakeGateway, accepted, client_of, completed, delta

_CODE = """
import sys
sys.modules["opentelemetry"] = None  # importing it raises ImportError
from shoal import trace_context
assert trace_context.current() == {}
"""


class Heard:
    """A gateway's script that notes what each connection, and its first message, says of a trace; breaks the first."""

    def __init__(self, *, num_cuts: int = 0) -> None:
        self.headers: list[TraceContext | None] = []
        self.messages: list[dict[str, Any]] = []
        self._num_cuts = num_cuts

    async def __call__(self, peer: Conversation) -> None:
        names = ("traceparent", "tracestate")
        self.headers.append(w3c.parse(*(peer.headers.getall(name, []) for name in names)))
        self.messages.append(await peer.receive())
        if len(self.messages) <= self._num_cuts:
            await peer.send(accepted(), delta(0, "Hel"))
            peer.cut()
            return
        text = "lo" if self._num_cuts else "Hello"
        await peer.send(accepted(), delta(5 - len(text), text), completed())
        await peer.closed()

    @property
    def in_messages(self) -> list[TraceContext | None]:
        """What the messages say themselves."""
        said = [(m.get("traceparent"), m.get("tracestate")) for m in self.messages]
        return [w3c.parse([parent], [state] if state else []) if parent else None for parent, state in said]


@pytest.fixture
def tracer() -> Tracer:
    """The caller's."""
    return TracerProvider().get_tracer("test")


def context_of(span: Span) -> tuple[int, int]:
    """Of which trace it is, and which span."""
    return span.get_span_context().trace_id, span.get_span_context().span_id


def ids(said: TraceContext | None) -> tuple[int, int] | None:
    """The same of what a gateway heard."""
    return None if said is None else (int.from_bytes(said.trace_id), int.from_bytes(said.span_id))


async def test_a_request_belongs_to_the_span_that_is_current(tracer: Tracer) -> None:
    heard = Heard()
    async with client_of(FakeGateway(heard)) as client:
        with tracer.start_as_current_span("asking") as span:
            await client.generate(**CHAT)
    assert [ids(said) for said in heard.headers] == [context_of(span)]
    assert [ids(said) for said in heard.in_messages] == [context_of(span)]


async def test_the_span_at_the_call_counts_wherever_the_stream_is_read(tracer: Tracer) -> None:
    heard = Heard()
    async with client_of(FakeGateway(heard)) as client:
        with tracer.start_as_current_span("asking") as span:
            stream = client.stream(**CHAT)
        with tracer.start_as_current_span("reading"):
            assert "".join([one.text async for one in stream]) == "Hello"
    assert ids(heard.in_messages[0]) == context_of(span)


async def test_a_stream_that_goes_on_elsewhere_stays_in_its_trace(tracer: Tracer) -> None:
    heard = Heard(num_cuts=1)
    async with client_of(FakeGateway(heard)) as client:
        with tracer.start_as_current_span("asking") as span:
            result = await client.generate(**CHAT)
    assert result.text == "Hello"
    assert [message["type"] for message in heard.messages] == ["request.create", "request.resume"]
    assert "traceparent" not in heard.messages[1], "the protocol has no such field there"
    assert [ids(said) for said in heard.headers] == [context_of(span)] * 2


async def test_a_request_of_somebody_else_is_resumed_in_the_trace_of_who_resumes_it(tracer: Tracer) -> None:
    heard = Heard()
    async with client_of(FakeGateway(heard)) as client:
        with tracer.start_as_current_span("resuming") as span:
            await _read(client.resume("req-1"))
    assert [ids(said) for said in heard.headers] == [context_of(span)]


async def _read(stream: shoal.Stream) -> None:
    async for _ in stream:
        pass


async def test_what_vendors_keep_in_a_trace_goes_along() -> None:
    context = SpanContext(1, 2, is_remote=False, trace_flags=TraceFlags(1), trace_state=TraceState([("vendor", "x")]))
    heard = Heard()
    async with client_of(FakeGateway(heard)) as client:
        with use_span(NonRecordingSpan(context)):
            await client.generate(**CHAT)
    assert heard.messages[0]["traceparent"] == f"00-{1:032x}-{2:016x}-01"
    assert heard.messages[0]["tracestate"] == "vendor=x"


async def test_without_a_current_span_nothing_is_said_of_traces() -> None:
    heard = Heard()
    async with client_of(FakeGateway(heard)) as client:
        await client.generate(**CHAT)
    assert heard.headers == [None]
    assert heard.messages[0].keys() == {"type", "id", "body", "token_ids"}


def test_without_opentelemetry_there_is_no_trace() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
