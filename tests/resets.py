"""Ending a TCP connection as a host that is gone does."""

import asyncio
import socket
import struct


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close a TCP connection with RST instead of FIN, at once."""
    assert isinstance(transport, asyncio.Transport)
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
