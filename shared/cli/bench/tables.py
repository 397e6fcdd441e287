"""Results as a table for people, or as JSON lines for programs."""

import dataclasses
import json

import click
from rich.console import Console
from rich.table import Table

from shared.cli.bench.load import Report

_COLUMNS = (
    ("at once", "concurrency", "d"),
    ("requests", "num_requests", "d"),
    ("failed", "num_failed", "d"),
    ("tokens/s", "output_tokens_per_s", ".1f"),
    ("TTFT p50 ms", "ttft_p50_ms", ".0f"),
    ("TTFT p99 ms", "ttft_p99_ms", ".0f"),
    ("TPOT p50 ms", "tpot_p50_ms", ".1f"),
    ("ITL p99 ms", "itl_p99_ms", ".1f"),
    ("cached", "cached_share", ".0%"),
)


def print_reports(title: str, reports: list[Report], *, as_json: bool) -> None:
    """One row a concurrency."""
    if as_json:
        for report in reports:
            click.echo(json.dumps(dataclasses.asdict(report)))
        return
    rows = [[format(getattr(report, name), form) for _, name, form in _COLUMNS] for report in reports]
    print_table(title, [heading for heading, _, _ in _COLUMNS], rows)
    for report in reports:
        if report.first_failure is not None:
            sentence = f"{report.num_failed} failed at {report.concurrency} at once, the first: {report.first_failure}"
            click.echo(sentence, err=True)


def print_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """Numbers are on the right, the first column on the left if it is text."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        is_text = number == 0 and rows and not rows[0][0].replace(".", "").isdigit()
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=120 if not Console().is_terminal else None).print(table)
