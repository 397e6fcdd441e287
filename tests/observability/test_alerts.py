"""The alerts: each says what is wrong and what to do, and is the same for both ways to run Prometheus."""

import re

from tests.kubernetes.manifests import kustomize, of_kind
from tests.kubernetes.settings import all_settings
from tests.kubernetes.validation import NEWEST, complaint
from tests.observability.metrics_table import ROOT, promised
from tests.observability.queries import DASHBOARDS, OBSERVABILITY, aggregated_by, load

(GROUP,) = load(OBSERVABILITY / "prometheus/alerts.yaml")["groups"]


def test_what_matters_has_an_alert() -> None:
    """Readiness, the queue's age, errors, blocks, lost messages, and what is not seen any more."""
    asked = " ".join(rule["expr"] for rule in GROUP["rules"])
    for name in (
        "shoal_gateway_ready",
        "shoal_scheduler_queue_age_seconds",
        'shoal_gateway_requests_total{ending="failed"}',
        "shoal_scheduler_preemptions_total",
        "shoal_messages_dropped_total",
        "shoal_broker_reconnections_total",
        "otelcol_exporter_send_failed_spans",
        "up{",
    ):
        assert name in asked


def test_each_says_what_is_wrong_and_what_to_do() -> None:
    for rule in GROUP["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_what_they_advise_exists() -> None:
    text = " ".join(rule["annotations"]["description"] for rule in GROUP["rules"])
    assert set(re.findall(r"SHOAL_\w+", text)) <= all_settings()
    series = {name.rsplit("_", 1)[0] for name in promised()} | set(promised())
    assert set(re.findall(r"shoal_\w+", text)) <= series


def test_labels_that_a_summary_names_are_left_by_its_query() -> None:
    for rule in GROUP["rules"]:
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = aggregated_by(rule["expr"]) | ({"job"} if rule["expr"].startswith("up{job=") else set())
        assert named <= kept


def test_the_operator_gets_the_same_alerts_and_dashboards() -> None:
    objects = kustomize(OBSERVABILITY)
    assert [text for item in objects if (text := complaint(item, NEWEST))] == []
    assert of_kind(objects, "PrometheusRule")["shoal"]["spec"]["groups"] == [GROUP]
    dashboards = of_kind(objects, "ConfigMap")["shoal-dashboards"]
    assert dashboards["data"] == {file.name: file.read_text() for file in DASHBOARDS}
    assert dashboards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert "kubectl apply -k deploy/observability" in (ROOT / "docs/kubernetes.md").read_text()
