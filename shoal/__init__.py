"""Shoal's client library: streams that go on when a connection breaks.

    import shoal

    async with shoal.Client("http://127.0.0.1:8000") as client:
        async for delta in client.stream(model="smollm2-135m", prompt="Once upon a time"):
            print(delta.text, end="", flush=True)

It needs aiohttp and nothing else of Shoal: `pip install shoal[client]`.
"""

from shoal.client import Client
from shoal.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    Disconnected,
    InvalidRequest,
    NotAllowed,
    NotAShoalGateway,
    NotFound,
    Overloaded,
    RequestCancelled,
    RequestError,
    RequestLost,
    ResumedElsewhere,
    ShoalError,
    TooLarge,
    Unavailable,
)
from shoal.results import Alternative, Choice, Delta, Result, Timing, TokenLogprob, Usage
from shoal.stream import Stream

__all__ = [
    "Alternative",
    "AuthenticationFailed",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Disconnected",
    "InvalidRequest",
    "NotAShoalGateway",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "RequestCancelled",
    "RequestError",
    "RequestLost",
    "Result",
    "ResumedElsewhere",
    "ShoalError",
    "Stream",
    "Timing",
    "TokenLogprob",
    "TooLarge",
    "Unavailable",
    "Usage",
]
