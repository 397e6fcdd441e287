"""`shoal up`: a whole mesh on this machine, from one command, until Ctrl-C."""

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import click

from shared import config as settings
from shared.cli.mesh import ports
from shared.cli.mesh.find import named_nats_url, nats_option
from shared.cli.mesh.nats_server import find_nats_server, nats_address, nats_command
from shared.cli.mesh.plan import MeshOptions, Program, StopOrder, parse_scale, service_names, service_programs
from shared.cli.mesh.report import JsonReporter, MeshReporter, TerminalReporter
from shared.cli.mesh.run import MeshRun
from shared.cli.mesh.settings_check import check_settings
from shared.cli.mesh.state import MeshFolder
from shared.cli.mesh.supervisor import GaveUp
from shared.clock import SystemClock
from shared.config import MeshConfig
from shared.errors import OperatorError
from shared.ids import Service

_EPILOG = """Services read SHOAL_* variables of the environment; `python -m services.NAME --settings` lists them.

Exit status: 0 after Ctrl-C, 1 if a process died too often, 2 for something that you must mend."""


@click.command(epilog=_EPILOG)
@click.option(
    "--port",
    default=8000,
    envvar="SHOAL_GATEWAY_PORT",
    show_default=True,
    type=click.IntRange(0, 65_000),
    help="Of the gateway; further gateways take the next ones, 0 a free one.",
)
@click.option(
    "--host", default="127.0.0.1", envvar="SHOAL_GATEWAY_HOST", show_default=True, help="Where clients come in."
)
@click.option("--model", help="Name of a model in the store, or what `shoal pull` takes.  [default: smollm2-135m]")
@click.option("--scale", multiple=True, metavar="SERVICE=N", help="How many of one service, such as executor=2.")
@click.option("--nats-url", help="Use this NATS server instead of an embedded one.")
@click.option("--home", type=click.Path(path_type=Path, file_okay=False), help="Folder for models and state.")
@click.option("--log-format", type=click.Choice(["auto", "pretty", "json"]), help="json: every event, for machines.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="What the services log.")
def command(
    port: int,
    host: str,
    model: str | None,
    scale: Sequence[str],
    nats_url: str | None,
    home: Path | None,
    log_format: str | None,
    log_level: str | None,
) -> None:
    """Start a whole mesh on this machine: NATS, the five services, and whatever they need.

    Fetches the model if it is not in the store. Processes that die are started again. Ctrl-C stops the mesh after
    what is being answered; a second one stops it at once.
    """
    num_instances = parse_scale(scale)
    check_settings(os.environ)
    mesh = settings.load(MeshConfig, os.environ)
    options = MeshOptions(
        host=host,
        port=port or ports.free_port(),
        model=model or mesh.model,
        home=(home or mesh.home).expanduser().absolute(),
        nats_url=nats_option(nats_url) if nats_url else named_nats_url(os.environ) or "",
        num_instances=num_instances,
        log_level=log_level or mesh.log_level,
        drain_deadline_s=mesh.drain_deadline_s,
        metrics_ports=_metrics_ports(num_instances, mesh.metrics_port if "SHOAL_METRICS_PORT" in os.environ else None),
    )
    folder = MeshFolder(options.home, options.port)
    with folder.claim():
        for each in options.ports:
            ports.check_is_free(options.host, each)
        options = dataclasses.replace(options, model=_have_model(options))
        reporter = _reporter(folder, options.log_level, home, is_json=(log_format or mesh.log_format) == "json")
        status = _serve(options, folder, reporter)
        if status == 0 and port == 0:
            folder.remove()  # nobody will find the logs of a mesh on just any port
    sys.exit(status)


def _metrics_ports(num_instances: Mapping[Service, int], first: int | None) -> dict[str, int]:
    """A port for the metrics of each process: the first one and those that follow, free ones, or with 0 none."""
    names = service_names(num_instances)
    if first == 0:
        return {}
    return dict(zip(names, ports.free_ports(len(names)) if first is None else count(first), strict=False))


def _serve(options: MeshOptions, folder: MeshFolder, reporter: MeshReporter) -> int:
    """The exit status, once the mesh has stopped."""
    options, programs = _programs(options, folder)
    try:
        run = MeshRun(options, programs, folder, reporter=reporter, clock=SystemClock())
    except OSError as error:
        raise OperatorError(f"cannot write to {folder.logs}: {error.strerror}; choose another --home") from error
    try:
        asyncio.run(run.run())
    except GaveUp as error:
        click.echo(f"shoal: {error}", err=True)
        return 1
    finally:
        reporter.stopped()
    return 0


def _programs(options: MeshOptions, folder: MeshFolder) -> tuple[MeshOptions, list[Program]]:
    """All processes of the mesh, the broker first unless it is somebody else's; and the options with its address."""
    broker = []
    if not options.nats_url:
        port = ports.free_port()
        nats = nats_command(find_nats_server(), port=port, store=folder.nats)
        broker = [Program("nats", tuple(nats), dict(os.environ), StopOrder.BROKER)]
        options = dataclasses.replace(options, nats_url=nats_address(port))
    return options, broker + service_programs(options, os.environ, _num_usable_cores())


def _reporter(folder: MeshFolder, log_level: str, home: Path | None, *, is_json: bool) -> MeshReporter:
    if is_json:
        return JsonReporter(log_level)
    from rich.console import Console

    logging.getLogger().addHandler(logging.NullHandler())  # what matters is said by the reporter
    return TerminalReporter(Console(), SystemClock(), str(folder.logs), str(home) if home else None)


def _have_model(options: MeshOptions) -> str:
    """The name of the model in the store, where it is now if it was not before."""
    from shared.cli.pull import pull_or_leave
    from shared.models.names import is_name
    from shared.models.sources import parse_source
    from shared.models.store import ModelStore

    store = ModelStore(options.home)
    if is_name(options.model) and store.has(options.model):
        store.folder(options.model)
        return options.model
    if not store.has(parse_source(options.model).name):
        click.echo(f"Fetching {options.model}, which is not in the store yet.", err=True)
    return pull_or_leave(options.home, options.model).manifest.name


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
