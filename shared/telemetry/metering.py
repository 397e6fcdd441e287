"""Makes the metrics of one process known while its actor runs: on a page, on a port of their own, and over OTLP.

Numbers are read in the event loop's thread, which takes a fraction of a millisecond; turning them into text or bytes
takes longer and is done in others. Serving depends on none of this: what cannot be done is said in the log. Without the
extra `telemetry` there is nothing but the answers to probes.
"""

import asyncio
import importlib.util
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final

from shared.actor import Actor
from shared.telemetry.exposition import Answer, Listener, Route
from shared.telemetry.metrics import Instrument, MetricsPage, Snapshot, snapshot
from shared.telemetry.metrics_process import LoopLag, Pulse, actor_instruments, process_instruments
from shared.telemetry.metrics_push import Exporter, Pusher
from shared.telemetry.otlp_settings import OtlpSettings, Signal, interval_s, otlp_settings
from shared.telemetry.resource import resource_of, said_of_resource

log = logging.getLogger(__name__)

Render = Callable[[Snapshot, Mapping[str, str], str], tuple[bytes, str]]
"""Makes a page of a snapshot, of whose it is, and of what is accepted."""

_LAST_PUSH_S: Final = 2.0
_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http", "prometheus_client")


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where the metrics of a process go."""

    host: str = "127.0.0.1"
    port: int | None = None
    """0: a free one; None: none."""
    collector: OtlpSettings | None = None
    """Where they are sent over OTLP; None: nowhere."""
    push_interval_s: float = 60.0
    """How often."""
    resource: Mapping[str, str] = field(default_factory=dict)
    """What the environment says of this process."""

    @staticmethod
    def of(host: str, port: int, environ: Mapping[str, str]) -> "MetricsSettings":
        """What the settings of a mesh, where port 0 is none, and OpenTelemetry's own variables say together. Raises
        ConfigError that names what is wrong with these."""
        collector = otlp_settings(environ, Signal.METRICS)
        return MetricsSettings(host, port or None, collector, interval_s(environ), said_of_resource(environ))


@dataclass(slots=True)
class Metering:
    """What came of it."""

    page: MetricsPage | None = None
    """None without the extra `telemetry`."""
    address: str = ""
    """Where it listens; empty if it does not."""


@asynccontextmanager
async def metering(
    actor: Actor[Any], settings: MetricsSettings, more: Sequence[Instrument] = ()
) -> AsyncIterator[Metering]:
    """Make the metrics of an actor and its process, and `more`, known until the context ends."""
    made = Metering()
    async with AsyncExitStack() as stack:
        if all(map(_is_installed, _PACKAGES)):
            lag = LoopLag()
            instruments = [
                *actor.instruments(),
                *actor_instruments(actor),
                lag.histogram,
                *process_instruments(time.monotonic()),
                *more,
            ]
            started_ns, resource = time.time_ns(), resource_of(actor.identity, settings.resource)
            render = await asyncio.to_thread(_renderer)
            thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
            stack.callback(thread.shutdown, wait=False, cancel_futures=True)
            made.page = _Page(instruments, resource, render, thread)
            actor.show_metrics(made.page)
            _beside(stack, lag.measure_for_ever())
            if settings.collector is not None:
                exporter = await asyncio.to_thread(_exporter, settings.collector, resource, started_ns)
                _push(stack, instruments, exporter, settings.push_interval_s)
        else:
            log.info("there are no metrics: the extra `telemetry` is not installed")
        if settings.port is not None:
            made.address = await _listen(stack, _routes(made.page, Pulse(actor)), settings.host, settings.port)
            actor.metrics_address = made.address
        yield made


class _Page:
    """All metrics of a process as text."""

    def __init__(
        self, instruments: list[Instrument], resource: Mapping[str, str], render: Render, thread: Executor
    ) -> None:
        self._instruments = instruments
        self._resource = resource
        self._render = render
        self._thread = thread
        self._turn = asyncio.Lock()

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page of this moment and its content type. One at a time, so that whoever asks often only waits longer."""
        async with self._turn:
            taken, loop = snapshot(self._instruments), asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._render, taken, self._resource, accept)


def _beside(stack: AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


async def _listen(stack: AsyncExitStack, routes: Mapping[str, Route], host: str, port: int) -> str:
    """Answer on a port of its own; the address, or nothing if it cannot be had."""
    listener = Listener(routes)
    try:
        await listener.start(host, port)
    except OSError as error:
        log.warning("metrics cannot be shown", extra={"host": host, "port": port, "error": str(error)})
        return ""
    stack.push_async_callback(listener.close)
    log.info("showing metrics", extra={"address": listener.address})
    return listener.address


def _push(stack: AsyncExitStack, instruments: list[Instrument], exporter: Exporter, every_s: float) -> None:
    """Send them once in a while, and once more at the end."""
    pusher = Pusher(exporter)

    async def push_for_ever() -> None:
        while True:
            await asyncio.sleep(every_s)
            pusher.push(snapshot(instruments), time.time_ns())

    async def end() -> None:
        await pusher.close(snapshot(instruments), time.time_ns(), _LAST_PUSH_S)

    stack.push_async_callback(end)
    _beside(stack, push_for_ever())
    log.info("sending metrics", extra={"interval_s": every_s})


def _routes(page: MetricsPage | None, pulse: Pulse) -> dict[str, Route]:
    async def metrics(headers: Mapping[str, str]) -> Answer:
        if page is None:
            return Answer(b"the extra `telemetry` is not installed\n", status=HTTPStatus.NOT_IMPLEMENTED)
        return Answer(*await page.render(headers.get("accept", "")))

    async def healthz(_headers: Mapping[str, str]) -> Answer:
        return _state(pulse.complaint())

    async def readyz(_headers: Mapping[str, str]) -> Answer:
        return _state(pulse.complaint() or pulse.unreadiness())

    return {"/metrics": metrics, "/healthz": healthz, "/readyz": readyz}


def _state(trouble: str | None) -> Answer:
    if trouble is None:
        return Answer(b"ok\n")
    return Answer(f"{trouble}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False


def _renderer() -> Render:
    """What makes a page of metrics. Imports what takes a while to import."""
    from shared.telemetry.metrics_text import render

    return render


def _exporter(collector: OtlpSettings, resource: Mapping[str, str], started_ns: int) -> Exporter:
    """The same goes for this one."""
    from shared.telemetry.metrics_otlp import OtlpExporter

    return OtlpExporter(collector, resource, started_ns)
