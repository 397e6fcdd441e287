"""One answer over the gateway's WebSocket: `shoal.v1.json`, text as it comes, cancellation, errors in plain words."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from shared.errors import OperatorError, ShoalError

_SUBPROTOCOL = "shoal.v1.json"
_NAME = "chat"
_CONNECT_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=5)
_CANCEL_TIMEOUT_S = 5.0
_MAX_FRAME_BYTES = 16 << 20


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
    usage: dict[str, Any] | None = None
    first_text_s: float | None = None
    """From the request to the first text, as seen here; None if there was no text."""
    last_text_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Output tokens, as the mesh counted them."""
        return int(self.usage["completion_tokens"]) if self.usage else 0

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
    gateway: Gateway, body: dict[str, object], *, on_text: Callable[[str], None], cancel: asyncio.Event
) -> Answer:
    """The answer to `body`; `on_text` gets each new piece of it. Setting `cancel` ends it early.

    Raises OperatorError if the gateway cannot be reached, and AnswerFailed.
    """
    async with aiohttp.ClientSession(timeout=_CONNECT_TIMEOUT, headers=gateway.headers) as session:
        try:
            async with session.ws_connect(
                f"{gateway.url}/v1/stream", protocols=(_SUBPROTOCOL,), max_msg_size=_MAX_FRAME_BYTES, heartbeat=20
            ) as socket:
                return await _converse(socket, body, on_text, cancel)
        except aiohttp.WSServerHandshakeError as error:
            raise refusal(gateway, error.status) from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise unreachable(gateway, error) from error


async def _converse(
    socket: aiohttp.ClientWebSocketResponse,
    body: dict[str, object],
    on_text: Callable[[str], None],
    cancel: asyncio.Event,
) -> Answer:
    began, answer = time.monotonic(), Answer()
    cancelling = asyncio.create_task(_cancel_on(cancel, socket))
    try:
        await _send(socket, {"type": "request.create", "id": _NAME, "body": body})
        async for frame in socket:
            if frame.type is not aiohttp.WSMsgType.TEXT:
                continue
            if _take(answer, json.loads(frame.data), on_text, time.monotonic() - began):
                return answer
    finally:
        cancelling.cancel()
    if cancel.is_set():
        answer.was_cancelled = True
        return answer
    if socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
        raise AnswerFailed("the text is larger than the gateway takes", is_too_long=True)
    raise AnswerFailed("the gateway closed the connection in the middle of the answer")


async def _send(socket: aiohttp.ClientWebSocketResponse, question: dict[str, object]) -> None:
    """Raises AnswerFailed if the gateway hangs up in the middle, as it does when a frame is too large."""
    try:
        await socket.send_json(question)
    except (ConnectionError, aiohttp.ClientError) as error:
        raise AnswerFailed(
            "the connection broke while the text was sent; it may be larger than the gateway takes", is_too_long=True
        ) from error


async def _cancel_on(cancel: asyncio.Event, socket: aiohttp.ClientWebSocketResponse) -> None:
    await cancel.wait()
    await socket.send_json({"type": "request.cancel", "id": _NAME})
    await asyncio.sleep(_CANCEL_TIMEOUT_S)
    await socket.close()


def _take(answer: Answer, event: dict[str, Any], on_text: Callable[[str], None], at_s: float) -> bool:
    """Add one event to the answer. True if it was the last. Raises AnswerFailed."""
    match event["type"]:
        case "request.delta":
            num_known = len(answer.text) - event["offset"]
            if num_known < 0:
                raise AnswerFailed("a piece of the answer is missing")
            if new := event["text"][num_known:]:
                answer.text += new
                answer.last_text_s = at_s
                if answer.first_text_s is None:
                    answer.first_text_s = at_s
                on_text(new)
            return False
        case "request.completed":
            answer.usage = event["usage"]
            answer.finish_reason = event["choices"][0]["finish_reason"]
            return True
        case "request.cancelled":
            answer.usage = event["usage"]
            answer.was_cancelled = True
            return True
        case "request.failed" | "error":
            error = event["error"]
            is_too_long = error.get("code") == "context_length_exceeded"
            raise AnswerFailed(error["message"].rstrip("."), is_too_long=is_too_long)
        case _:
            return False


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
