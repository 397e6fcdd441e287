"""Whether a gateway says that a request would be served. Plain HTTP over a socket: nothing to import, no proxies."""

import asyncio
import contextlib
import http.client
import json
from dataclasses import dataclass

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer of `/readyz`."""

    is_ready: bool
    missing: tuple[str, ...] = ()
    """The services of which there is none for the model; empty if the gateway did not say."""


def client_host(host: str) -> str:
    """The address under which something that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def address(host: str, port: int) -> str:
    """The URL of a gateway, for a client on this machine."""
    host = client_host(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def ask(host: str, port: int, model: str) -> Readiness | None:
    """What the gateway says of `model`; None if it does not answer."""
    return await asyncio.to_thread(ask_now, host, port, model)


def ask_now(host: str, port: int, model: str) -> Readiness | None:
    """The same, blocking."""
    host = client_host(host)
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/readyz")
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException):
            return None
    try:
        missing = json.loads(body)["missing"].get(model, ())
    except (ValueError, KeyError, TypeError, AttributeError):
        missing = ()
    return Readiness(response.status == 200 and not missing, tuple(map(str, missing)))
