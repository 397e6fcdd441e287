"""Where in a trace of the caller's a request belongs, in the W3C's words.

OpenTelemetry's API says so, where it is installed and a span is current; this library does not need it. Begins no span.
"""

try:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _propagator = None
else:
    _propagator = TraceContextTextMapPropagator()


def current() -> dict[str, str]:
    """`traceparent` and, if there is one, `tracestate` of the span that is current here; nothing if none is."""
    said: dict[str, str] = {}
    if _propagator is not None:
        _propagator.inject(said)
    return said
