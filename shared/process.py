"""From a service's `__main__` to a running actor: configuration, logs, transport, signals, exit status.

Exit status 0 after a drain; 2 for something that the operator must mend (restarting does not help); 1 for a bug.
"""

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from shared import config as settings
from shared import health
from shared import log as logs
from shared.actor import Actor, Identity
from shared.clock import Clock, SystemClock
from shared.config import Config, MeshConfig
from shared.errors import ConfigError, OperatorError
from shared.ids import InstanceId, Service, is_instance_id, new_instance_id
from shared.telemetry.answering import Answering
from shared.telemetry.metering import MetricsSettings, metering
from shared.telemetry.settings import tracing_of
from shared.telemetry.tracing import Tracing
from shared.transport import Transport
from shared.transport.nats import NatsTransport

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Config)

EXIT_BUG = 1
EXIT_OPERATOR = 2
_HOSTNAME = "{hostname}"
"""In the name of an instance: so those that share one configuration, as containers of a service do, have names."""
_EXPORT_WITHIN_S = 1.0
"""How long a process that leaves goes on exporting spans."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[C]):
    """What a service is built from."""

    identity: Identity
    transport: Transport
    clock: Clock
    mesh: MeshConfig
    config: C
    tracing: Tracing = field(default_factory=Tracing)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)


def run(service: Service, kind: type[C], build: Callable[[Parts[C]], Awaitable[Actor[Any]]]) -> NoReturn:
    """Run one instance until it is told to stop, then exit the process.

    `build` makes the actor; it may load what the service needs and raise OperatorError if that is not there.
    The command line cannot change what it does: `--settings` and `--help` print and exit, all else is refused.
    """
    if sys.argv[1:]:
        sys.exit(_answer(service, kind, sys.argv[1:]))
    try:
        mesh, config = _configuration(kind)
        if mesh.instance_id and not is_instance_id(mesh.instance_id, service):
            raise ConfigError(f"SHOAL_INSTANCE_ID: {mesh.instance_id!r} is not such as {new_instance_id(service)}")
    except OperatorError as error:
        sys.exit(_complain(service, error))
    instance_id = InstanceId(mesh.instance_id) if mesh.instance_id else new_instance_id(service)
    name = mesh.instance_name.replace(_HOSTNAME, socket.gethostname())
    identity = Identity(service, instance_id, name or instance_id)
    logs.configure(name=identity.name, level=mesh.log_level, style=mesh.log_format)
    logs.log_what_nobody_catches()
    log.info("configured", extra=settings.describe(mesh) | settings.describe(config))
    sys.setswitchinterval(mesh.switch_interval_ms / 1000)
    transport = NatsTransport(mesh.nats_url, name=identity.name, answers_under=f"_INBOX.{service}")
    try:
        tracing = tracing_of(identity, mesh, os.environ)
        metrics = MetricsSettings.of(mesh.metrics_host, mesh.metrics_port, os.environ)
        parts = Parts(identity, transport, SystemClock(), mesh, config, tracing, metrics)
        asyncio.run(_serve(parts, build))
    except OperatorError as error:
        sys.exit(_complain(service, error))
    except Exception:
        log.critical("a bug ends this process", exc_info=True)
        sys.exit(EXIT_BUG)
    sys.exit(0)


def _answer(service: Service, kind: type[Config], arguments: Sequence[str]) -> int:
    """Print what the arguments ask for; the exit status."""
    if list(arguments) not in (["--settings"], ["--help"], ["-h"]):
        return _complain(
            service,
            ConfigError(
                f"{shlex.join(arguments)}: a service takes no arguments but --help and --settings; "
                f"everything is set by environment variables"
            ),
        )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--settings | head` ends like any other program
    if arguments[0] != "--settings":
        print(
            f"usage: python -m services.{service} [--settings | --help]\n\n"
            f"Runs one {service} until SIGTERM or SIGINT. --settings lists these variables, which it reads at start:\n"
        )
    for name, default, help_text in settings.explain(MeshConfig) + settings.explain(kind):
        print(f"{name:<40} {help_text} [{default}]")
    return 0


def _configuration(kind: type[C]) -> tuple[MeshConfig, C]:
    """What the environment says. Raises ConfigError that names every offending variable of both at once."""
    problems = []
    for each in (MeshConfig, kind):
        try:
            settings.load(each, os.environ)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    return settings.load(MeshConfig, os.environ), settings.load(kind, os.environ)


async def _serve(parts: Parts[C], build: Callable[[Parts[C]], Awaitable[Actor[Any]]]) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        actor = await _start_unless(stop, parts, build)
        if actor is not None:
            await _run_until(stop, actor, parts)
    finally:
        await parts.transport.close()
        parts.tracing.close(_EXPORT_WITHIN_S)
    log.info("stopped")
    if actor is None:
        _leave_now()


def _leave_now() -> NoReturn:
    """Exit without waiting for a thread that still loads a model, which nothing can interrupt."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _start_unless(
    stop: asyncio.Event, parts: Parts[C], build: Callable[[Parts[C]], Awaitable[Actor[Any]]]
) -> Actor[Any] | None:
    """The actor, or None if told to stop before it was ready: what is still starting has nothing to drain."""
    starting, stopping = asyncio.create_task(_start(parts, build)), asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        stopping.cancel()
        return await starting
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    return None


async def _run_until(stop: asyncio.Event, actor: Actor[Any], parts: Parts[Any]) -> None:
    async with actor, metering(actor, parts.metrics, parts.tracing.instruments()):
        await Answering(parts.identity, parts.transport, parts.tracing).start()
        log.info("started")
        beside = [asyncio.create_task(_drain_on(stop, actor, parts.mesh.drain_deadline_s))]
        if parts.mesh.health_file is not None:
            beside.append(asyncio.create_task(_show_health(actor, parts.mesh.health_file)))
        try:
            await actor.run()
        finally:
            for task in beside:
                task.cancel()


async def _show_health(actor: Actor[Any], file: Path) -> None:
    """Touch `file` as long as the actor gets to its ticks, behind everything else in its mailbox, and is connected;
    the file beside it also while it is not connected."""
    num_seen = actor.num_handled_ticks
    while True:
        await asyncio.sleep(health.TOUCH_INTERVAL_S)
        if actor.num_handled_ticks != num_seen:
            num_seen = actor.num_handled_ticks
            _touch(health.alive_file(file))
            if actor.transport.is_connected:
                _touch(file)


async def _show_life(file: Path | None) -> None:
    """Say that this instance is alive: it may load for minutes, and wait for the broker for as long as that is away."""
    while file is not None:
        _touch(health.alive_file(file))
        await asyncio.sleep(health.TOUCH_INTERVAL_S)


def _touch(file: Path) -> None:
    try:
        health.touch(file)
    except OSError as error:
        log.warning("cannot say that this instance is healthy", extra={"error": str(error)})


async def _start(parts: Parts[C], build: Callable[[Parts[C]], Awaitable[Actor[Any]]]) -> Actor[Any]:
    connecting = asyncio.create_task(parts.transport.connect())
    showing = asyncio.create_task(_show_life(parts.mesh.health_file))
    try:
        actor = await build(parts)
        await connecting
    finally:
        for task in (connecting, showing):
            task.cancel()  # and is waited for: nobody may close the transport while it still connects
        await asyncio.gather(connecting, showing, return_exceptions=True)
    return actor


async def _drain_on(stop: asyncio.Event, actor: Actor[Any], deadline_s: float) -> None:
    await stop.wait()
    actor.drain(deadline_s)


def _complain(service: Service, error: OperatorError) -> int:
    print(f"{service}: {error}", file=sys.stderr)
    return EXIT_OPERATOR
