"""Ports: free ones, and who holds one that is not."""

import os
import socket
from pathlib import Path

import pytest

from shared.cli.mesh import ports
from shared.cli.mesh.ports import check_is_free, free_port, free_ports
from shared.errors import OperatorError


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port()
    check_is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_taken_port_is_said_with_who_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OperatorError) as caught:
            check_is_free("127.0.0.1", port)
    sentence = str(caught.value)
    assert sentence.startswith(f"port {port} is taken by process {os.getpid()} (")
    assert sentence.endswith("; choose another with --port")


def test_a_port_whose_connections_still_linger_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as accepted:
            accepted.shutdown(socket.SHUT_RDWR)  # the server closes first, so it is its side that waits
    check_is_free("127.0.0.1", port)


def test_an_address_of_another_machine_is_said_to_be_wrong() -> None:
    with pytest.raises(OperatorError, match=r"cannot listen on 192\.0\.2\.1 port 8000"):
        check_is_free("192.0.2.1", 8000)


def test_ports_that_are_taken_together_are_all_different_and_free() -> None:
    found = free_ports(32)
    assert len(set(found)) == 32
    for port in found:
        check_is_free("127.0.0.1", port)


def test_no_outgoing_connection_can_take_a_port_before_it_is_listened_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outgoing = tmp_path / "range"
    outgoing.write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "_RANGE", outgoing)
    assert all(15_000 <= port < 20_000 for port in free_ports(16))


@pytest.mark.parametrize("text", ["1024\t65535\n", "", "none"])
def test_where_all_ports_are_for_outgoing_connections_any_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    outgoing = tmp_path / "range"
    outgoing.write_text(text)
    monkeypatch.setattr(ports, "_RANGE", outgoing)
    found = free_ports(16)
    assert len(set(found)) == 16
    for port in found:
        check_is_free("127.0.0.1", port)
