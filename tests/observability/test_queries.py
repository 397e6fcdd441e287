"""Every query of dashboards, alerts and scaling asks for metrics and labels that there are."""

import pytest

from tests.observability.metrics_table import promised
from tests.observability.queries import Query, all_queries, complaints

KNOWN = promised()


@pytest.mark.parametrize("query", all_queries(), ids=str)
def test_it_asks_for_what_there_is(query: Query) -> None:
    assert list(complaints(query, KNOWN)) == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("sum(rate(", "cannot be read"),
        ("shoal_gateway_readiness", "there is no shoal_gateway_readiness"),
        ("sum by (tenant) (shoal_gateway_ready)", "no series that it asks for has the label tenant"),
        ('shoal_scheduler_blocks{status="free"}', "shoal_scheduler_blocks has no label status"),
        ('shoal_scheduler_blocks{state="used"}', "state of shoal_scheduler_blocks is never used"),
        ("sum(shoal_scheduler_preemptions_total)", "shoal_scheduler_preemptions_total is a counter"),
        ("rate(shoal_scheduler_queue_age_seconds[1m])", "shoal_scheduler_queue_age_seconds is a gauge"),
        ("rate(shoal_executor_step_rows[1m])", "there is no shoal_executor_step_rows"),
        (
            "histogram_quantile(0.5, sum by (model) (rate(shoal_scheduler_queue_duration_seconds_bucket[1m])))",
            "needs the label le",
        ),
    ],
)
def test_a_query_that_is_wrong_is_noticed(text: str, wrong: str) -> None:
    assert wrong in " ".join(complaints(Query("here", text), KNOWN))


def test_a_legend_that_names_no_label_is_noticed() -> None:
    query = Query("here", "sum by (state) (shoal_scheduler_blocks)", "{{status}}")
    assert list(complaints(query, KNOWN)) == ["no series that it asks for has the label status"]


def test_the_table_of_metrics_is_read() -> None:
    assert KNOWN["shoal_scheduler_blocks"].words >= {"held", "free"}
    assert KNOWN["gen_ai_server_request_duration_seconds_bucket"].labels >= {"gen_ai_request_model", "error_type"}
    assert len(KNOWN) > 100
