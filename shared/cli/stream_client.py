"""One answer of a gateway, by way of the client library: text as it comes, cancellation, errors in plain words."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

import shoal
from shared.errors import OperatorError, ShoalError

_CONNECT_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5)
_CANCEL_TIMEOUT_S = 5.0
_PATIENCE_S = 15.0
"""A gateway that died is back within seconds, if anybody restarts it."""


class AnswerFailed(ShoalError):
    """The mesh refused or failed this request; the message says why."""

    def __init__(self, message: str, *, is_too_long: bool = False) -> None:
        """`is_too_long`: the conversation does not fit the model's context."""
        super().__init__(message)
        self.is_too_long = is_too_long


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where to ask, and as whom."""

    url: str
    """Without a path, such as `http://127.0.0.1:8000`."""
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Answer:
    """What came back."""

    text: str = ""
    was_cancelled: bool = False
    finish_reason: str | None = None
    usage: shoal.Usage | None = None
    first_text_s: float | None = None
    """From the request to the first text, as seen here; None if there was no text."""
    last_text_s: float = 0.0

    def add(self, text: str, *, at_s: float) -> None:
        """More of it came."""
        self.text += text
        self.last_text_s = at_s
        if self.first_text_s is None:
            self.first_text_s = at_s

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the mesh counted them."""
        return self.usage.completion_tokens if self.usage else 0

    @property
    def tokens_per_s(self) -> float | None:
        """Between the first and the last text; None if there is nothing to divide."""
        if self.first_text_s is None or self.num_tokens < 2 or self.last_text_s <= self.first_text_s:
            return None
        return (self.num_tokens - 1) / (self.last_text_s - self.first_text_s)


def normalized_url(text: str) -> str:
    """The address of a gateway as people type it, without path. Raises OperatorError for what is none."""
    url = urlsplit(text if "://" in text else f"http://{text}")
    if url.scheme not in ("http", "https") or not url.netloc or url.path.rstrip("/") not in ("", "/v1"):
        raise OperatorError(f"{text!r} is not the address of a gateway, such as http://127.0.0.1:8000")
    return f"{url.scheme}://{url.netloc}"


async def list_models(gateway: Gateway) -> list[str]:
    """The models that the mesh has. Raises OperatorError if it cannot be asked."""
    async with aiohttp.ClientSession(timeout=_CONNECT_TIMEOUT, headers=gateway.headers) as session:
        try:
            async with session.get(f"{gateway.url}/v1/models") as response:
                if response.status != HTTPStatus.OK:
                    raise refusal(gateway, response.status)
                return [str(model["id"]) for model in (await response.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise unreachable(gateway, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise OperatorError(f"what answers at {gateway.url} is not a Shoal gateway") from error


async def ask(
    gateway: Gateway, body: dict[str, Any], *, on_text: Callable[[str], None], cancel: asyncio.Event
) -> Answer:
    """The answer to `body`; `on_text` gets each new piece of it. Setting `cancel` ends it early.

    If the gateway dies meanwhile, it is waited for, and the answer goes on where it was. Raises OperatorError if the
    gateway cannot be reached, and AnswerFailed.
    """
    answer = Answer()
    try:
        async with shoal.Client(gateway.url, api_key=gateway.api_key, patience_s=_PATIENCE_S) as client:
            await _read(client.stream(**body), answer, on_text, cancel)
    except shoal.Disconnected as error:
        raise _unreached(gateway, error) from error
    except shoal.NotAShoalGateway as error:
        raise OperatorError(error.args[0].rstrip(".")) from error
    except shoal.AuthenticationFailed as error:
        raise refusal(gateway, HTTPStatus.UNAUTHORIZED) from error
    except shoal.RequestError as error:
        is_too_long = isinstance(error, shoal.TooLarge) or error.code == "context_length_exceeded"
        raise AnswerFailed(error.message.rstrip("."), is_too_long=is_too_long) from error
    return answer


async def _read(stream: shoal.Stream, answer: Answer, on_text: Callable[[str], None], cancel: asyncio.Event) -> None:
    began = time.monotonic()
    stopping = asyncio.create_task(_stop_on(cancel, stream))
    try:
        async for delta in stream:
            if delta.text:
                answer.add(delta.text, at_s=time.monotonic() - began)
                on_text(delta.text)
    except shoal.RequestCancelled as error:
        answer.usage = error.usage
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
    if stream.result is None:
        answer.was_cancelled = True
    else:
        answer.usage, answer.finish_reason = stream.result.usage, stream.result.finish_reason


async def _stop_on(cancel: asyncio.Event, stream: shoal.Stream) -> None:
    await cancel.wait()
    await stream.stop()
    await asyncio.sleep(_CANCEL_TIMEOUT_S)
    await stream.cancel()


def _unreached(gateway: Gateway, error: shoal.Disconnected) -> ShoalError:
    """What to tell somebody whose gateway was tried again and again: what became of the last try."""
    cause: BaseException | None = error
    while cause is not None:
        match cause:
            case shoal.Unavailable():
                return refusal(gateway, HTTPStatus.SERVICE_UNAVAILABLE)
            case shoal.RequestError():
                return AnswerFailed(cause.message.rstrip("."))
            case aiohttp.ClientError() | OSError():
                return unreachable(gateway, cause)
        cause = cause.__cause__
    return OperatorError(error.args[0].rstrip("."))


def unreachable(gateway: Gateway, error: Exception) -> OperatorError:
    """What to tell somebody whose gateway does not answer."""
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return OperatorError(f"nothing answers at {gateway.url}; start it with `shoal up`")
    return OperatorError(f"the connection to {gateway.url} broke: {str(error) or type(error).__name__}")


def refusal(gateway: Gateway, status: int) -> OperatorError:
    """What to tell somebody whom a gateway answered with this status."""
    match status:
        case HTTPStatus.UNAUTHORIZED:
            what = "does not know the key" if gateway.api_key else "wants a key"
            return OperatorError(f"the gateway at {gateway.url} {what}; give the right one with --api-key")
        case HTTPStatus.FORBIDDEN:
            return OperatorError(f"the gateway at {gateway.url} does not allow this to the key")
        case HTTPStatus.SERVICE_UNAVAILABLE:
            return OperatorError(f"the gateway at {gateway.url} takes no requests at this moment; try again soon")
        case _:
            return OperatorError(f"what answers at {gateway.url} is not a Shoal gateway (status {status})")
