"""One error tree, split by whose fault it is.

`RequestError`: the client's, or the mesh's answer to one client; it fails that request and travels as `ErrorInfo`.
`OperatorError`: whoever runs the mesh; its message says what to do, and the process ends.
`MessageError`: a peer sent something unreadable, or we would; counted and dropped.
Anything else is a bug: it is logged once and ends the process, which the supervisor restarts.
"""

from typing import ClassVar


class ShoalError(Exception):
    """The root of every error that Shoal raises on purpose."""


class RequestError(ShoalError):
    """Ends one request with an HTTP status and OpenAI's error shape.

    `param` names the offending field, as a path such as `messages[0].role`. `retry_after_s` becomes `Retry-After`.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """Malformed, out of range or unsupported."""

    status, type, code = 400, "invalid_request_error", "invalid_value"


class UnsupportedField(InvalidRequest):
    """A field that Shoal does not know or does not support; it is never ignored."""

    code = "unsupported_field"


class PromptTooLong(InvalidRequest):
    """Prompt and requested output do not fit the model's context, or the executor's cache."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class NotFound(RequestError):
    """An unknown model, request or path."""

    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """No service in the mesh serves this model."""

    code = "model_not_found"


class TooLarge(RequestError):
    """A body or prompt larger than the mesh carries."""

    status, type, code = 413, "invalid_request_error", "request_too_large"


class Overloaded(RequestError):
    """The queue is full; try again later."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class Unavailable(RequestError):
    """Nobody can serve this now: a service is missing, or drains."""

    status, type, code = 503, "service_unavailable_error", "unavailable"


class Stalled(RequestError):
    """The mesh accepted the request and then went silent."""

    status, type, code = 504, "server_error", "stalled"


class DeadlineExceeded(RequestError):
    """The request's own `timeout_ms` is over."""

    status, type, code = 504, "timeout_error", "deadline_exceeded"


class OperatorError(ShoalError):
    """Something that whoever runs the mesh must mend. The message is a plain sentence that says how."""


class ConfigError(OperatorError):
    """A setting that is missing, malformed or out of range; names the variable."""


class ModelError(OperatorError):
    """A model folder that is missing, incomplete or not what it claims; names the file or weight."""


class MessageError(ShoalError):
    """Bytes that are not a message of the expected kind."""


class PayloadTooLarge(MessageError):
    """A message larger than the broker carries."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(f"a message of {size} bytes for {subject} exceeds the broker's limit of {limit} bytes")
        self.size = size
        self.limit = limit


class BucketUnavailable(ShoalError):
    """What the broker keeps cannot be read or changed at this moment."""


class LedgerUnavailable(ShoalError):
    """The broker's records cannot be read, or it has not said that it kept one."""


class Disconnected(ShoalError):
    """The broker cannot be reached and the buffer for unsent messages is full, or the transport is closed."""
