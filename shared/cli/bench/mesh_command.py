"""`shoal bench mesh`: what a token costs in each service of a mesh, measured under load."""

import asyncio
import json

import click

from shared.cli.bench.load import Load, Report, run
from shared.cli.bench.load_command import concurrency_option
from shared.cli.bench.private_mesh import PrivateMesh, private_mesh
from shared.cli.bench.tables import print_reports, print_table

_SERVICES = ("gateway", "tokenizer", "scheduler", "detokenizer", "nats", "executor")


@click.command("mesh")
@click.option("--model", default="smollm2-135m", show_default=True, help="A model in the store.")
@concurrency_option
@click.option("--requests", default=2, show_default=True, type=click.IntRange(1), help="Requests for each stream.")
@click.option("--json", "as_json", is_flag=True, help="JSON objects, one a line, instead of tables.")
def mesh_command(model: str, concurrency: list[int], requests: int, as_json: bool) -> None:
    """Start a mesh of its own, load it, and print speed and the CPU time of every process for each output token.

    Two hundred words in, 128 tokens out, streamed over HTTP. What the mesh costs is the sum of all but the executor.
    """
    click.echo(f"Starting a mesh for {model} …", err=True)
    with private_mesh(model) as mesh:
        click.echo(f"It is ready after {mesh.ready_s:.1f} s; warming up …", err=True)
        asyncio.run(run(mesh.url, model, Load(num_output_tokens=16), concurrency=2, num_requests=4))  # warm up
        reports, costs = [], []
        for number in concurrency:
            click.echo(f"{number * requests} requests, {number} at once …", err=True)
            report, cost = _measure(mesh, model, number, number * requests)
            reports.append(report)
            costs.append(cost)
        resident = mesh.resident_bytes()
        ready_s = mesh.ready_s
    print_reports(f"{model}: ready in {ready_s:.1f} s; 200 words in, 128 tokens out", reports, as_json=as_json)
    if as_json:
        for number, cost in zip(concurrency, costs, strict=True):
            click.echo(json.dumps({"concurrency": number, "cpu_us_per_token": cost}))
        click.echo(json.dumps({"ready_s": ready_s, "resident_bytes": resident}))
        return
    click.echo()
    headings = ["CPU µs per token", *(f"{number} at once" for number in concurrency), "MiB resident"]
    rows = [
        [name, *(f"{cost.get(name, 0):.0f}" for cost in costs), f"{resident.get(name, 0) / (1 << 20):.0f}"]
        for name in _SERVICES
    ]
    own = [sum(cost.get(name, 0) for name in _SERVICES[:-1]) for cost in costs]
    print_table("What a token costs", headings, [*rows, ["all but the executor", *(f"{cost:.0f}" for cost in own), ""]])


def _measure(mesh: PrivateMesh, model: str, concurrency: int, num_requests: int) -> tuple[Report, dict[str, float]]:
    """What the clients saw, and CPU microseconds for each output token by service."""
    before = mesh.cpu_seconds()
    load = Load(seed=concurrency)
    report = asyncio.run(run(mesh.url, model, load, concurrency=concurrency, num_requests=num_requests))
    after = mesh.cpu_seconds()
    return report, {
        name: (seconds - before.get(name, 0.0)) / report.output_tokens * 1e6 for name, seconds in after.items()
    }
