"""What tests of traces share: exporters to one collector, and trees of spans as they are written down."""

import asyncio
from typing import Any

import aiohttp

from shared.actor import Identity
from shared.telemetry.export import QueueExporter
from shared.telemetry.otlp import OtlpSender
from shared.telemetry.otlp_settings import OtlpSettings
from shared.telemetry.tracing import Exporter
from tests.integration.cast import Cast
from tests.integration.in_process import MODEL, InProcessMesh
from tests.shared.telemetry.collector import Collector, Told

TEXT = "The river runs past the mill and under the bridge, and the miller counts the sacks. "
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
CHAT, COMPLETION = f"chat {MODEL}", f"text_completion {MODEL}"
LONG = {"prompt": TEXT, "max_tokens": 1500, "ignore_eos": True}

Row = tuple[str, str, str | None]
"""Who tells of a span, what it is called, and the name of the one above it; None at the top."""


def below(root: str, *rows: tuple[str, str]) -> list[Row]:
    """A server span at the top, and the others below it."""
    return [("gateway", root, None), *((service, name, root) for service, name in rows)]


SERVED = (("tokenizer", "tokenize"), ("scheduler", "queue"), ("scheduler", "prefill"), ("scheduler", "decode"))


class Exports:
    """Makes exporters to one collector, and has them send all they have."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self._exporters: list[QueueExporter] = []

    def __call__(self, identity: Identity) -> Exporter:
        resource = {"service.name": f"shoal-{identity.service}", "service.instance.id": identity.instance_id}
        exporter = QueueExporter(OtlpSender(OtlpSettings(self.collector.traces_url), resource, "0"), pause_s=0.05)
        self._exporters.append(exporter)
        return exporter

    async def tree(self, trace_id: str) -> list[Told]:
        """All spans of a trace, by start, once everybody has sent what it had."""
        for exporter in self._exporters:
            await asyncio.to_thread(exporter.close, 30.0)
            assert exporter.num_dropped == 0
        found = [span for span in self.collector.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.start_ns)


def rows(tree: list[Told]) -> list[Row]:
    """The tree as it is written down in the tests."""
    by_id = {span.span_id: span.name for span in tree}
    return sorted(
        ((s.service.removeprefix("shoal-"), s.name, by_id.get(s.parent_id)) for s in tree),
        key=lambda row: (row[2] is not None, row),
    )


def check_tree(tree: list[Told], expected: list[Row]) -> None:
    """The tree is as written down, in one piece, every span within time, and no text of anybody in it."""
    assert rows(tree) == sorted(expected, key=lambda row: (row[2] is not None, row))
    (root,) = [span for span in tree if span.kind == "SERVER" and not span.name.startswith("resume")]
    for span in tree:
        assert root.start_ns <= span.start_ns <= span.end_ns, span
        assert span.is_error is ("error.type" in span.attributes)
        assert TEXT[:9] not in repr(span)
    assert root.parent_id in ("", SPAN_ID)


def of_survivors(tree: list[Told]) -> list[Told]:
    """What a process that is killed cannot tell; here it does while its parts are given back."""
    return [span for span in tree if span.attributes.get("shoal.outcome") != "handed_over"]


async def timeline(mesh: InProcessMesh | Cast, request_id: str) -> dict[str, Any]:
    """What the gateway says of a request."""
    url = mesh.url() if isinstance(mesh, Cast) else mesh.url
    async with mesh.session.get(f"{url}/v1/requests/{request_id}/trace?steps=true") as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def until(socket: aiohttp.ClientWebSocketResponse, kind: str) -> None:
    """Take messages up to one of a kind."""
    while (await socket.receive_json(timeout=20))["type"] != kind:
        pass
