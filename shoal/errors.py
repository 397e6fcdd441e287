"""What can go wrong with a request, as exceptions. Owns which error of a gateway becomes which of them."""

from collections.abc import Mapping
from typing import Any, Final

from shoal.results import Usage, usage_of


class ShoalError(Exception):
    """The root of everything that this library raises on purpose."""


class Disconnected(ShoalError):
    """No gateway could be reached for as long as the client was told to try."""


class NotAShoalGateway(ShoalError):
    """What answers at an address does not speak as a gateway of this version does."""


class RequestError(ShoalError):
    """A gateway refused or failed the request. The subclasses say whose fault it is."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
        usage: Usage | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """A word for programs, such as `context_length_exceeded`."""
        self.param = param
        """The field at fault, such as `messages[0].role`."""
        self.retry_after_s = retry_after_s
        """When to try again, if that makes sense."""
        self.request_id = request_id
        """What its trace is found by; None if the gateway gave it none."""
        self.usage = usage
        """What it consumed, if it failed or was cancelled after some output."""


class InvalidRequest(RequestError):
    """A field is malformed, out of range or not supported, or the prompt is too long for the model."""


class TooLarge(InvalidRequest):
    """The request has more bytes than the mesh carries."""


class NotFound(InvalidRequest):
    """There is no such model, or no such request to resume."""


class RequestLost(NotFound):
    """The request cannot be resumed: it is gone for too long, or all that knew of it died. Its text so far stands."""


class AuthenticationFailed(RequestError):
    """The API key is missing or wrong."""


class NotAllowed(RequestError):
    """The API key does not give the right to do this."""


class Overloaded(RequestError):
    """The queue is full; `retry_after_s` says when to try again."""


class Unavailable(RequestError):
    """Nobody can serve this now."""


class DeadlineExceeded(RequestError):
    """The request's own `timeout_ms` is over."""


class ResumedElsewhere(RequestError):
    """Somebody resumed the request on another connection, where it goes on."""


class RequestCancelled(RequestError):
    """The request was cancelled, though not by leaving this stream."""


_BY_CODE: Final[Mapping[str, type[RequestError]]] = {
    "request_too_large": TooLarge,
    "model_not_found": NotFound,
    "not_found": NotFound,
}
_BY_TYPE: Final[Mapping[str, type[RequestError]]] = {
    "invalid_request_error": InvalidRequest,
    "authentication_error": AuthenticationFailed,
    "permission_error": NotAllowed,
    "rate_limit_error": Overloaded,
    "service_unavailable_error": Unavailable,
    "timeout_error": DeadlineExceeded,
    "conflict_error": ResumedElsewhere,
}
_BY_STATUS: Final[Mapping[int, tuple[type[RequestError], str]]] = {
    400: (InvalidRequest, "The gateway refused the connection."),
    401: (AuthenticationFailed, "The API key is missing or wrong."),
    403: (NotAllowed, "The API key does not give the right to do this."),
    429: (Overloaded, "The gateway has too much to do."),
    502: (Unavailable, "The gateway is not there at this moment."),
    503: (Unavailable, "The gateway takes no requests at this moment."),
    504: (Unavailable, "The gateway did not answer in time."),
}


def error_of(event: Mapping[str, Any]) -> RequestError:
    """The exception for a `request.failed` of a gateway."""
    error = event["error"]
    kind = _BY_CODE.get(error.get("code") or "") or _BY_TYPE.get(error.get("type") or "", RequestError)
    return kind(
        error["message"],
        code=error.get("code"),
        param=error.get("param"),
        retry_after_s=event.get("retry_after_s"),
        request_id=event.get("request_id"),
        usage=usage_of(event["usage"]) if event.get("usage") else None,
    )


def error_of_status(status: int, address: str) -> ShoalError:
    """The exception for a connection that was answered with an HTTP status instead."""
    if status in _BY_STATUS:
        kind, message = _BY_STATUS[status]
        return kind(message)
    return NotAShoalGateway(f"What answers at {address} is no Shoal gateway (status {status}).")
