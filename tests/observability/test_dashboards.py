"""The dashboards as files: Grafana can lay them out, and provisioning finds them."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.observability.queries import DASHBOARDS, OBSERVABILITY, load, panels

each = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
_WIDTH = 24


def test_there_is_one_of_the_mesh_and_one_of_a_service() -> None:
    assert [load(file)["uid"] for file in DASHBOARDS] == ["shoal-mesh", "shoal-service"]


@each
def test_every_panel_says_what_it_shows_and_in_what_unit(file: Path) -> None:
    for panel in panels(load(file)):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]


@each
def test_no_two_panels_have_one_number_title_or_place(file: Path) -> None:
    every = load(file)["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)
    for panel in every:
        assert 0 <= panel["gridPos"]["x"] <= _WIDTH - panel["gridPos"]["w"]
    for one, other in combinations(every, 2):
        assert not _overlap(one["gridPos"], other["gridPos"]), f"{one['title']} lies on {other['title']}"


def _overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


@each
def test_every_query_asks_the_source_that_its_reader_chose(file: Path) -> None:
    dashboard = load(file)
    assert dashboard["templating"]["list"][0]["name"] == "source"
    for panel in panels(dashboard):
        for asked in [panel, *panel["targets"]]:
            assert asked["datasource"] == {"type": "prometheus", "uid": "${source}"}


@each
def test_every_rate_is_over_the_interval_that_grafana_finds_right(file: Path) -> None:
    for panel in panels(load(file)):
        for target in panel["targets"]:
            assert target["expr"].count("[") == target["expr"].count("[$__rate_interval]")


def test_grafana_is_told_where_dashboards_and_sources_are() -> None:
    (source, traces) = load(OBSERVABILITY / "grafana/provisioning/datasources/sources.yaml")["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert (traces["type"], traces["url"]) == ("jaeger", "http://jaeger:16686")
    (provider,) = load(OBSERVABILITY / "grafana/provisioning/dashboards/folder.yaml")["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"


def test_the_service_is_chosen_from_those_that_there_are() -> None:
    variables: list[dict[str, Any]] = load(OBSERVABILITY / "grafana/dashboards/service.json")["templating"]["list"]
    (jobs,) = [variable["query"] for variable in variables if variable["name"] == "job"]
    (prometheus,) = load(OBSERVABILITY / "prometheus/prometheus.yaml")["scrape_configs"][0]["dns_sd_configs"]
    assert jobs.split(",") == prometheus["names"]
