"""The metrics that docs/metrics.md promises, as Prometheus sees them. Owns how its tables are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
"""What the page calls `the three`."""


@dataclass(frozen=True, slots=True)
class Promised:
    """One row: a family of series, its labels, and the words in code that its meaning names."""

    name: str
    kind: str
    labels: frozenset[str]
    words: frozenset[str]

    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


def promised(page: Path = ROOT / "docs/metrics.md") -> Mapping[str, Promised]:
    """Every series of the page, by name."""
    by_series: dict[str, Promised] = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or cells[2] not in ("counter", "gauge", "histogram"):
            continue
        labels = set(_code(cells[3])) | (set(_GEN_AI) if "the three" in cells[3] else set())
        row = Promised(_code(cells[1])[0], cells[2], frozenset(labels), frozenset(_code(cells[4])))
        by_series |= dict.fromkeys(row.series(), row)
    return by_series


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
