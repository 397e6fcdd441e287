"""TCP ports of this machine: finding a free one, and saying who holds one that is not."""

import contextlib
import errno
import random
import socket
from pathlib import Path
from typing import Final

import psutil

from shared.errors import OperatorError

_LOWEST: Final = 15_000
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST: Final = 32_768


def free_port() -> int:
    """A port of the loopback that nobody listens on at this moment."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback, all different, that nobody listens on at this moment.

    They are below those that the system gives to outgoing connections, any of which could have taken one before whoever
    is to listen on it has started.
    """
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        below = range(_LOWEST, _first_outgoing())
        for port in [*random.SystemRandom().sample(below, min(len(below), 50 * count)), *[0] * count]:
            if len(found) < count:
                with contextlib.suppress(OSError):
                    server = stack.enter_context(socket.create_server(("127.0.0.1", port)))
                    found.append(server.getsockname()[1])
    if len(found) < count:
        raise OperatorError(f"this machine has no {count} free ports left")
    return found


def _first_outgoing() -> int:
    """The first port that the system takes for outgoing connections."""
    try:
        return max(_LOWEST, int(_RANGE.read_text().split()[0]))
    except (OSError, ValueError, IndexError):  # no Linux
        return _USUAL_FIRST


def check_is_free(host: str, port: int) -> None:
    """Raises OperatorError that says what to do if this address cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
    except OSError as error:
        raise OperatorError(_explain(host, port, error)) from error


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken{_by_whom(port)}; choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used by this user; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def _by_whom(port: int) -> str:
    try:
        holders = {
            connection.pid
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid
        }
        (pid,) = holders
        return f" by process {pid} ({psutil.Process(pid).name()})"
    except (psutil.Error, ValueError):  # not ours to see, gone by now, or several
        return ""
