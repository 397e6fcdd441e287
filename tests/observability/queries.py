"""Every PromQL query of the project, and what is wrong with one. Owns where queries stand and the rules for them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import promql_parser
import yaml

from tests.kubernetes.manifests import build
from tests.observability.metrics_table import ROOT, Promised

OBSERVABILITY = ROOT / "deploy/observability"
DASHBOARDS = tuple(sorted((OBSERVABILITY / "grafana/dashboards").glob("*.json")))

_OF_SCRAPES: Final = {"job", "instance", "namespace", "le"}
"""Labels that Prometheus gives, on Kubernetes and elsewhere."""
_NOT_OURS: Final = re.compile(r"up|otelcol_\w+")
_RATES: Final = ("rate", "increase")


@dataclass(frozen=True, slots=True)
class Query:
    """One query, and where it stands."""

    place: str
    text: str
    legend: str = ""

    def __str__(self) -> str:
        return self.place


def load(file: Path) -> Any:
    """A file of JSON or YAML."""
    return json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())


def panels(dashboard: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Those of a dashboard that show something."""
    return (panel for panel in dashboard["panels"] if panel["type"] != "row")


def all_queries() -> list[Query]:
    """Those of dashboards, alerts and scaling."""
    found = []
    for file in DASHBOARDS:
        for panel in panels(load(file)):
            for target in panel["targets"]:
                place = f"{file.name}: {panel['title']}: {target['refId']}"
                found.append(Query(place, _without_variables(target["expr"]), target["legendFormat"]))
    for group in load(OBSERVABILITY / "prometheus/alerts.yaml")["groups"]:
        found += [Query(f"alerts.yaml: {rule['alert']}", rule["expr"]) for rule in group["rules"]]
    for item in build("everything"):
        if item["kind"] == "ScaledObject":
            for trigger in item["spec"]["triggers"]:
                place = f"scaling of {item['metadata']['name']}: {trigger.get('name', '')}"
                found.append(Query(place, trigger["metadata"]["query"]))
    return found


def _without_variables(text: str) -> str:
    """A dashboard's query as Prometheus gets it, for some choice of its variables."""
    return text.replace("$__rate_interval", "1m").replace("$job", "gateway").replace("$instance", ".*")


def asked_for(query: Query) -> set[str]:
    """The names of the series of Shoal's that a query asks for."""
    names = {selector.name or _name_in(selector) for selector in _Whole(promql_parser.parse(query.text)).selectors}
    return {name for name in names if not _NOT_OURS.fullmatch(name)}


def complaints(query: Query, known: Mapping[str, Promised]) -> Iterator[str]:
    """What is wrong with a query: with its grammar, or with what it asks for. `known` is by series."""
    try:
        expression = promql_parser.parse(query.text)
    except ValueError as error:
        yield f"cannot be read: {error}"
        return
    whole = _Whole(expression)
    asked: set[str] = set(_OF_SCRAPES)
    for selector in whole.selectors:
        name = selector.name or _name_in(selector)
        if _NOT_OURS.fullmatch(name):
            continue
        if name not in known:
            yield f"there is no {name}"
            continue
        asked |= known[name].labels
        yield from _of_selector(name, known[name], selector, is_rated=id(selector) in whole.rated)
    for label in [*whole.labels, *re.findall(r"\{\{(\w+)\}\}", query.legend)]:
        if label not in asked:
            yield f"no series that it asks for has the label {label}"
    for bucket in whole.quantiles_without_le:
        yield f"a quantile of {bucket} needs the label le"


def aggregated_by(text: str) -> set[str]:
    """The labels that a query's sums, maxima and the like keep."""
    return set(_Whole(promql_parser.parse(text)).labels)


class _Whole:
    """What a query consists of. Keeps the nodes, so that their identity is theirs."""

    def __init__(self, expression: promql_parser.Expr) -> None:
        self.nodes: list[Any] = []
        promql_parser.walk(expression, self.nodes.append)
        ranges = [node for node in self.nodes if isinstance(node, promql_parser.MatrixSelector)]
        in_ranges = {str(node.vector_selector) for node in ranges}
        self.selectors = [node for node in self.nodes if isinstance(node, promql_parser.VectorSelector)]
        self.rated = {id(node) for node in self.selectors if str(node) in in_ranges}
        self.labels = [
            label
            for node in self.nodes
            if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None
            for label in node.modifier.labels
        ]
        self.quantiles_without_le = [
            str(node)
            for node in self.nodes
            if isinstance(node, promql_parser.Call) and node.func.name == "histogram_quantile"
            if "le" not in node.args[1].modifier.labels
        ]


def _name_in(selector: Any) -> str:
    """The name that a selector's matcher asks for, without what may be missing at its end."""
    (name,) = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "__name__"]
    return str(name.removesuffix("(_total)?"))


def _of_selector(name: str, row: Promised, selector: Any, *, is_rated: bool) -> Iterator[str]:
    if is_rated == (row.kind == "gauge"):
        yield f"{name} is a {row.kind}, and its rate {'means nothing' if is_rated else 'is what says something'}"
    for matcher in selector.matchers.matchers:
        if matcher.name not in row.labels | _OF_SCRAPES:
            yield f"{name} has no label {matcher.name}"
        elif matcher.name not in _OF_SCRAPES:
            unknown = set(matcher.value.split("|")) - row.words
            if unknown:
                yield f"{matcher.name} of {name} is never {', '.join(sorted(unknown))}"
