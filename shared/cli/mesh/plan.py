"""What processes a mesh is made of: their names, commands and environments. Starts nothing."""

import enum
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import OperatorError
from shared.ids import Service

MAX_INSTANCES = 64
"""Of one service on one machine; more is a slip of the finger."""


class StopOrder(enum.IntEnum):
    """Who is told to stop first: from the client's side inwards, so that nobody loses what it still needs."""

    GATEWAY = 0
    MIDDLE = 1
    """Tokenizers and schedulers."""
    WORKERS = 2
    """Executors and detokenizers."""
    BROKER = 3


_STOP_ORDER = {
    Service.GATEWAY: StopOrder.GATEWAY,
    Service.TOKENIZER: StopOrder.MIDDLE,
    Service.SCHEDULER: StopOrder.MIDDLE,
    Service.EXECUTOR: StopOrder.WORKERS,
    Service.DETOKENIZER: StopOrder.WORKERS,
}


@dataclass(frozen=True, slots=True)
class Program:
    """One process to keep alive."""

    name: str
    """For people, such as `executor-1`; also the name of its log."""
    command: tuple[str, ...]
    environ: Mapping[str, str]
    stop_order: StopOrder = StopOrder.WORKERS


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """What `shoal up` was told."""

    host: str
    port: int
    """Of the first gateway; further ones take the ports that follow."""
    model: str
    home: Path
    nats_url: str
    num_instances: Mapping[Service, int] = field(default_factory=lambda: dict.fromkeys(Service, 1))
    log_level: str = "info"
    drain_deadline_s: float = 20.0
    metrics_ports: Mapping[str, int] = field(default_factory=dict)
    """Of each process by its name; one that is not there shows no metrics."""

    @property
    def ports(self) -> range:
        """The ports of all gateways."""
        return range(self.port, self.port + self.num_instances[Service.GATEWAY])


def parse_scale(texts: Iterable[str]) -> dict[Service, int]:
    """How many instances of each service, from texts such as `executor=2`. Raises OperatorError for a bad one."""
    counts = dict.fromkeys(Service, 1)
    for text in texts:
        name, equals, number = text.strip().partition("=")
        if not equals or name not in list(Service):
            raise OperatorError(f"--scale {text!r}: say SERVICE=N, where SERVICE is one of {', '.join(Service)}")
        if not re.fullmatch(r"[0-9]{1,4}", number) or int(number) > MAX_INSTANCES:
            raise OperatorError(f"--scale {text!r}: N is a whole number from 0 to {MAX_INSTANCES}, not {number!r}")
        service, count = Service(name), int(number)
        if service is Service.GATEWAY and count == 0:
            raise OperatorError(f"--scale {text!r}: a mesh without a gateway has no address; start services alone")
        counts[service] = count
    return counts


def service_names(num_instances: Mapping[Service, int]) -> list[str]:
    """The names of all service processes, in the order in which they are started: what is slow to start first."""
    return [f"{service}-{number}" for service in reversed(Service) for number in range(1, num_instances[service] + 1)]


def service_programs(options: MeshOptions, environ: Mapping[str, str], num_cores: int) -> list[Program]:
    """The services of a mesh. What `environ` says is passed on, unless an option says otherwise."""
    return [
        Program(
            name=f"{service}-{number}",
            command=service_command(service),
            environ=_service_environ(options, environ, service, number, num_cores),
            stop_order=_STOP_ORDER[service],
        )
        for service in reversed(Service)  # what is slow to start first
        for number in range(1, options.num_instances[service] + 1)
    ]


def service_command(service: Service) -> tuple[str, ...]:
    """The command of one instance. The folder that it is started in must not shadow our packages, hence `-P`."""
    return (sys.executable, "-P", "-m", f"services.{service}")


def _service_environ(
    options: MeshOptions, environ: Mapping[str, str], service: Service, number: int, num_cores: int
) -> dict[str, str]:
    settings = dict(environ) | {
        "SHOAL_NATS_URL": options.nats_url,
        "SHOAL_HOME": str(options.home),
        "SHOAL_MODEL": options.model,
        "SHOAL_INSTANCE_NAME": f"{service}-{number}",
        "SHOAL_LOG_LEVEL": options.log_level,
        "SHOAL_LOG_FORMAT": "json",
        "SHOAL_METRICS_PORT": str(options.metrics_ports.get(f"{service}-{number}", 0)),
        "PYTHONUNBUFFERED": "1",
    }
    if service is Service.GATEWAY:
        settings["SHOAL_GATEWAY_HOST"] = options.host
        settings["SHOAL_GATEWAY_PORT"] = str(options.ports[number - 1])
    if service is Service.EXECUTOR:
        settings |= _thread_limits(environ, options.num_instances[Service.EXECUTOR], num_cores)
    return settings


def _thread_limits(environ: Mapping[str, str], num_executors: int, num_cores: int) -> dict[str, str]:
    """Executors share the cores: two that each use them all are slower together than one after the other."""
    asked = environ.get("SHOAL_EXECUTOR_THREADS", "0")
    threads = asked if asked.isdecimal() and int(asked) > 0 else str(max(1, num_cores // num_executors))
    limits = {"OMP_NUM_THREADS": threads, "SHOAL_EXECUTOR_THREADS": threads}
    return {name: limit for name, limit in limits.items() if environ.get(name, "0") == "0"}


def in_order(programs: Sequence[Program]) -> list[list[Program]]:
    """The programs in the waves in which they are told to stop."""
    return [[program for program in programs if program.stop_order is order] for order in StopOrder]
