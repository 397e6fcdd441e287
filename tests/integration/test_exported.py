"""A mesh of real processes and a real collector: what each process says of itself, also on its way out."""

import json
import os
import urllib.request

import pytest

from shared.cli.bench.private_mesh import private_mesh
from tests.conftest import DEFAULT_MODEL
from tests.shared.telemetry.collector import collecting

pytestmark = [pytest.mark.model, pytest.mark.mesh]

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def _chat(url: str) -> str:
    body = {"model": DEFAULT_MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()
        return str(response.headers["X-Request-Id"])


@pytest.mark.usefixtures("default_model")
def test_all_that_processes_have_seen_is_with_the_collector_when_they_have_left() -> None:
    with collecting() as collector:
        environ = dict(os.environ) | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_RESOURCE_ATTRIBUTES": "zone=a",
        }
        with private_mesh(DEFAULT_MODEL, environ) as mesh:
            request_id = _chat(mesh.url)
        spans = [span for span in collector.spans if span.trace_id == TRACE_ID]
        steps = collector.named("step")
    assert [span.name for span in spans if span.kind == "SERVER"] == [f"chat {DEFAULT_MODEL}"]
    told = {(span.service, span.name) for span in spans + steps}
    assert told == {
        ("shoal-gateway", f"chat {DEFAULT_MODEL}"),
        ("shoal-tokenizer", "tokenize"),
        ("shoal-scheduler", "queue"),
        ("shoal-scheduler", "prefill"),
        ("shoal-scheduler", "decode"),
        ("shoal-detokenizer", "detokenize"),
        ("shoal-executor", "step"),
    }
    assert {span.attributes["shoal.request.id"] for span in spans} == {request_id}
    for span in spans + steps:
        service = span.service.removeprefix("shoal-")
        assert span.resource["service.instance.id"].startswith(f"{service}-")
        assert span.resource["shoal.instance.name"] == f"{service}-1"
        assert span.resource["service.version"]
        assert span.resource["zone"] == "a"
    (root,) = [span for span in spans if span.kind == "SERVER"]
    assert {links for step in steps for links in step.links} == {(TRACE_ID, root.span_id)}
