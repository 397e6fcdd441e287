"""The page that Prometheus reads, parsed as Prometheus does."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from shared.telemetry.metrics import Histogram, Instrument, Kind, Reading, snapshot
from shared.telemetry.metrics_text import render


def page(instruments: Sequence[Instrument], accept: str = "") -> str:
    return render(snapshot(instruments), {"service.name": "shoal-test"}, accept)[0].decode()


def families(instruments: Sequence[Instrument]) -> dict[str, Metric]:
    return {family.name: family for family in parse_text(page(instruments))}


def test_a_counter_has_its_unit_and_total_in_its_name() -> None:
    busy = Reading("shoal.executor.busy", Kind.COUNTER, "s", "Time inside steps", lambda: 1.5)
    family = families([busy])["shoal_executor_busy_seconds"]
    assert (family.type, family.documentation) == ("counter", "Time inside steps")
    assert [(sample.name, sample.value) for sample in family.samples] == [("shoal_executor_busy_seconds_total", 1.5)]


@pytest.mark.parametrize("kind", [Kind.GAUGE, Kind.SUM])
def test_what_goes_up_and_down_is_a_gauge_and_an_annotation_is_no_unit(kind: Kind) -> None:
    waiting = Reading("shoal.queue.length", kind, "{request}", "Who waits", lambda: {"a": 1, "b": 2}, ("model.name",))
    family = families([waiting])["shoal_queue_length"]
    assert family.type == "gauge"
    assert {sample.labels["model_name"]: sample.value for sample in family.samples} == {"a": 1, "b": 2}


def test_a_histogram_has_growing_buckets_a_sum_and_a_count() -> None:
    histogram = Histogram("shoal.step", "s", "Steps", (0.5, 1, 2.5), ("model",))
    for value in (0.1, 0.5, 0.7, 9):
        histogram.record(value, "tiny")
    family = families([histogram])["shoal_step_seconds"]
    assert family.type == "histogram"
    numbers = {(sample.name, sample.labels.get("le")): sample.value for sample in family.samples}
    assert numbers == {
        ("shoal_step_seconds_bucket", "0.5"): 2,
        ("shoal_step_seconds_bucket", "1.0"): 3,
        ("shoal_step_seconds_bucket", "2.5"): 3,
        ("shoal_step_seconds_bucket", "+Inf"): 4,
        ("shoal_step_seconds_count", None): 4,
        ("shoal_step_seconds_sum", None): pytest.approx(10.3),
    }
    assert all(sample.labels["model"] == "tiny" for sample in family.samples)


def test_the_page_says_whose_it_is() -> None:
    (sample,) = families([])["target_info"].samples
    assert (sample.labels, sample.value) == ({"service_name": "shoal-test"}, 1)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_can_be_a_label(text: str) -> None:
    reading = Reading("test.count", Kind.COUNTER, "1", 'A "help"\nof \\ two lines', lambda: {text: 1}, ("tenant",))
    (sample,) = families([reading])["test_count"].samples
    assert sample.labels["tenant"] == text


def test_whoever_likes_openmetrics_better_gets_it() -> None:
    counter = Reading("shoal.tokens", Kind.COUNTER, "{token}", "Tokens", lambda: 3)
    histogram = Histogram("shoal.step", "s", "Steps", (1,))
    histogram.record(1)
    accept = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.3"
    body, content_type = render(snapshot([counter, histogram]), {"a": "b"}, accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(body.decode())}  # type: ignore[no-untyped-call]
    assert names == {"target", "shoal_tokens", "shoal_step_seconds"}
    assert render((), {}, "*/*")[1].startswith("text/plain")
