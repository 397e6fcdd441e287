"""The metrics of a running actor: on a page, on a port, and over OTLP to a collector."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest

from shared import subjects
from shared.actor import Actor, Identity, Tick
from shared.cli.mesh.ports import free_port
from shared.clock import FakeClock
from shared.codec import encode
from shared.errors import ConfigError
from shared.ids import InstanceId, Service
from shared.messages import AttachExecutor, DetokenizerStatus, Status
from shared.telemetry import metering as under_test
from shared.telemetry.metering import MetricsSettings, metering
from shared.telemetry.metrics import Histogram, Instrument, Kind, MetricsPage, Reading
from shared.telemetry.otlp_settings import OtlpSettings
from shared.transport.memory import MemoryBroker, MemoryTransport
from tests.shared.telemetry.collector import Collector, collecting
from tests.shared.telemetry.scrape import Page, fetch, scrape

ME = Identity(Service.EXECUTOR, InstanceId("executor-1"), "executor-1")
PATIENCE_S = 20.0
OWN_PORT = MetricsSettings(port=0)


class _Actor(Actor[AttachExecutor]):
    """Counts what it hears, and can be made to hang."""

    tick_interval_s = 0.01

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(ME, MemoryTransport(broker), AttachExecutor, FakeClock())
        self.num_heard = 0
        self.heard = asyncio.Condition()
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.page: MetricsPage | None = None
        self.words = Histogram("test.words", "{word}", "Words", (1, 2), ("language",))

    async def handle(self, message: AttachExecutor | Tick) -> None:
        await self.may_go_on.wait()
        async with self.heard:
            self.num_heard += isinstance(message, AttachExecutor)
            self.heard.notify_all()

    async def until_heard(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.heard:
            await self.heard.wait_for(lambda: self.num_heard >= count)

    def instruments(self) -> tuple[Instrument, ...]:
        return (Reading("test.heard", Kind.COUNTER, "{message}", "Heard", lambda: self.num_heard), self.words)

    def show_metrics(self, page: MetricsPage) -> None:
        self.page = page

    def status(self) -> Status:
        return DetokenizerStatus()

    def models(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
async def actor(memory_broker: MemoryBroker) -> AsyncIterator[_Actor]:
    """One that runs."""
    actor = _Actor(memory_broker)
    await actor.transport.connect()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(actor.transport.close)
        await stack.enter_async_context(actor)
        running = asyncio.create_task(actor.run())
        yield actor
        actor.may_go_on.set()
        actor.drain(0)
        await running


async def tell(actor: _Actor, times: int) -> None:
    message = encode(AttachExecutor(InstanceId("scheduler-1")))
    before = actor.num_heard
    for _ in range(times):
        await actor.transport.publish(subjects.inbox(ME.instance_id), message)
    await actor.until_heard(before + times)


async def test_the_page_has_what_the_actor_counts_and_what_all_processes_tell(actor: _Actor) -> None:
    async with metering(actor, OWN_PORT) as made:
        await tell(actor, 3)
        actor.words.record(2, "en")
        page = await scrape(made.address)
    assert page.value("test_heard_total") == 3
    assert page.value("test_words_bucket", language="en", le="2.0") == 1
    assert page.value("shoal_mailbox_handled_total", message="attach_executor") == 3
    assert page.value("shoal_messages_dropped_total", reason="service") == 0
    assert page.value("shoal_broker_connected") == 1
    assert page.value("shoal_broker_messages_total", direction="received") == 3
    assert page.value("shoal_broker_io_bytes_total", direction="received") == 3 * len(
        encode(AttachExecutor(InstanceId("scheduler-1")))
    )
    assert page.value("process_memory_usage_bytes") > 10 << 20
    assert page.total("process_cpu_time_seconds_total") > 0
    assert page.value("process_unix_file_descriptor_count") > 3
    assert page.value("process_thread_count") >= 1
    assert page.value("process_uptime_seconds") >= 0
    (target,) = page.families["target_info"].samples
    assert target.labels["service_name"] == "shoal-executor"
    assert target.labels["service_instance_id"] == "executor-1"


async def test_the_lag_of_the_loop_is_measured(actor: _Actor) -> None:
    async with metering(actor, OWN_PORT) as made:
        page = await until_measured(made.address, 1)
        count = page.value("shoal_loop_lag_seconds_count")
        time.sleep(0.6)  # noqa: ASYNC251  # what is measured: the loop stands still
        page = await until_measured(made.address, count + 1)
    late = page.value("shoal_loop_lag_seconds_count") - page.value("shoal_loop_lag_seconds_bucket", le="0.2")
    assert late >= 1
    assert page.value("shoal_loop_lag_seconds_sum") > 0.3


async def until_measured(address: str, count: float) -> Page:
    """The metrics once the loop's lag was measured so often."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            page = await scrape(address)
            if page.total("shoal_loop_lag_seconds_count") >= count:
                return page
            await asyncio.sleep(0.05)


async def test_the_actor_gets_the_page_to_show_it_elsewhere(actor: _Actor) -> None:
    async with metering(actor, MetricsSettings()) as made:
        assert made.address == ""
        assert actor.page is made.page
        assert actor.page is not None
        body, content_type = await actor.page.render("application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")


async def test_reconnections_to_the_broker_are_counted(actor: _Actor) -> None:
    async with metering(actor, OWN_PORT) as made:
        assert isinstance(actor.transport, MemoryTransport)
        actor.transport.reconnect()
        actor.transport.reconnect()
        assert (await scrape(made.address)).value("shoal_broker_reconnections_total") == 2


async def test_many_scrapers_at_once_are_all_answered(actor: _Actor) -> None:
    async with metering(actor, OWN_PORT) as made:
        pages = await asyncio.gather(*(scrape(made.address) for _ in range(10)))
    assert all(page.value("test_heard_total") == 0 for page in pages)


async def test_probes_tell_whether_it_works_and_whether_it_takes_work(actor: _Actor) -> None:
    clock = actor.clock
    assert isinstance(clock, FakeClock)
    async with metering(actor, OWN_PORT) as made:
        assert (await fetch(f"{made.address}/healthz"))[0] == 200
        assert (await fetch(f"{made.address}/readyz"))[0] == 200
        actor.may_go_on.clear()
        await fetch(f"{made.address}/healthz")
        clock.advance(6)
        status, text = await fetch(f"{made.address}/healthz")
        assert (status, text) == (503, "has handled nothing for 6.0 s\n")
        assert (await fetch(f"{made.address}/readyz"))[0] == 503
        actor.may_go_on.set()
        before = actor.num_handled_ticks
        async with asyncio.timeout(PATIENCE_S), actor.heard:
            await actor.heard.wait_for(lambda: actor.num_handled_ticks > before)
        assert (await fetch(f"{made.address}/healthz"))[0] == 200
        actor.is_draining = True
        assert (await fetch(f"{made.address}/healthz"))[0] == 200
        assert (await fetch(f"{made.address}/readyz")) == (503, "is draining\n")
        assert (await scrape(made.address)).value("shoal_draining") == 1


async def test_a_port_that_is_taken_is_said_in_the_log_and_changes_nothing_else(
    actor: _Actor, caplog: pytest.LogCaptureFixture
) -> None:
    async with metering(actor, OWN_PORT) as first:
        port = int(first.address.rpartition(":")[2])
        with caplog.at_level(logging.WARNING):
            async with metering(actor, MetricsSettings(port=port)) as second:
                assert second.address == ""
                await tell(actor, 1)
        assert [record.message for record in caplog.records] == ["metrics cannot be shown"]
        assert (await scrape(first.address)).value("test_heard_total") == 1


async def test_without_the_extra_there_is_one_line_in_the_log_and_probes_are_answered(
    actor: _Actor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_PACKAGES", ("no_such_package.at_all", "prometheus_client"))
    with caplog.at_level(logging.INFO):
        async with metering(actor, MetricsSettings(port=0, collector=OtlpSettings("http://127.0.0.1:9"))) as made:
            actor.words.record(1, "en")
            assert made.page is actor.page is None
            assert (await fetch(f"{made.address}/metrics"))[0] == 501
            assert (await fetch(f"{made.address}/healthz"))[0] == 200
    assert [record.message for record in caplog.records if "metrics" in record.message] == [
        "there are no metrics: the extra `telemetry` is not installed",
        "showing metrics",
    ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Receives what is sent over OTLP."""
    with collecting() as collector:
        yield collector


async def test_metrics_are_sent_again_and_again_and_once_at_the_end(
    actor: _Actor, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor.words.record(1.5, "en")
    said = {"deployment.environment.name": "trial", "service.name": "mine"}
    settings = MetricsSettings(collector=OtlpSettings(collector.metrics_url), push_interval_s=0.05, resource=said)
    monkeypatch.setattr(under_test, "_LAST_PUSH_S", PATIENCE_S)
    async with metering(actor, settings):
        await collector.until(lambda: len(collector.metrics) >= 2)
        await tell(actor, 4)
    last = collector.metrics[-1]
    assert last.resource["service.name"] == "mine"
    assert last.resource["deployment.environment.name"] == "trial"
    assert last.resource["service.instance.id"] == "executor-1"
    heard = last.named["test.heard"]
    assert (heard.sum.is_monotonic, heard.unit) == (True, "{message}")
    assert [point.as_double or point.as_int for point in heard.sum.data_points] == [4]
    (words,) = last.named["test.words"].histogram.data_points
    assert (list(words.bucket_counts), list(words.explicit_bounds), words.sum) == ([0, 1, 0], [1, 2], 1.5)
    assert {each.key: each.value.string_value for each in words.attributes} == {"language": "en"}
    assert not last.named["shoal.mailbox.depth"].sum.is_monotonic
    assert last.named["shoal.draining"].WhichOneof("data") == "gauge"


async def test_numbers_over_otlp_and_on_the_page_are_the_same(
    actor: _Actor, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = MetricsSettings(port=0, collector=OtlpSettings(collector.metrics_url), push_interval_s=0.05)
    monkeypatch.setattr(under_test, "_LAST_PUSH_S", PATIENCE_S)
    async with metering(actor, settings) as made:
        await tell(actor, 2)
        page = await scrape(made.address)
    pushed = {name.replace(".", "_") for name in collector.metrics[-1].named}
    shown = {name.removesuffix("_seconds").removesuffix("_bytes") for name in page.families if name != "target_info"}
    assert pushed - {"shoal_loop_lag"} == shown - {"shoal_loop_lag"}


async def test_a_collector_that_is_away_holds_nobody_up(
    actor: _Actor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "_LAST_PUSH_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000")  # which the exporter alone would take for seconds
    away = OtlpSettings(f"http://127.0.0.1:{free_port()}/v1/metrics", timeout_s=0.2)
    settings = MetricsSettings(port=0, collector=away, push_interval_s=0.02)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        async with metering(actor, settings) as made:
            await tell(actor, 5)
            assert (await scrape(made.address)).value("test_heard_total") == 5
            async with asyncio.timeout(PATIENCE_S):
                while not caplog.records:  # noqa: ASYNC110  # it is said in another thread
                    await asyncio.sleep(0.01)
    assert time.monotonic() - began < PATIENCE_S / 2
    (record,) = caplog.records
    assert record.message == "metrics cannot be sent; trying with the next ones"
    assert "export" in vars(record)["error"]


def test_the_settings_of_a_mesh_and_opentelemetrys_variables_decide_together() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_METRIC_EXPORT_INTERVAL": "500"}
    environ["OTEL_SERVICE_NAME"] = "llm"
    collector = OtlpSettings("http://127.0.0.1:4318/v1/metrics")
    assert MetricsSettings.of("::1", 0, environ) == MetricsSettings(
        "::1", None, collector, 0.5, {"service.name": "llm"}
    )
    assert MetricsSettings.of("::1", 9464, {}) == MetricsSettings("::1", 9464, None)
    with pytest.raises(ConfigError, match="OTEL_RESOURCE_ATTRIBUTES"):
        MetricsSettings.of("::1", 0, {"OTEL_RESOURCE_ATTRIBUTES": "zone"})


async def test_what_else_is_to_be_measured_is_on_the_page(actor: _Actor) -> None:
    more = [Reading("test.more", Kind.COUNTER, "{thing}", "More", lambda: 7)]
    async with metering(actor, OWN_PORT, more) as made:
        assert (await scrape(made.address)).value("test_more_total") == 7
