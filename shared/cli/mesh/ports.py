"""TCP ports of this machine: finding a free one, and saying who holds one that is not."""

import contextlib
import errno
import socket

import psutil

from shared.errors import OperatorError


def free_port() -> int:
    """A port of the loopback that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def free_ports(count: int) -> list[int]:
    """So many ports of the loopback, all different, that nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


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
