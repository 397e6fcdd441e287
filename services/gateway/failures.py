"""How a failure looks to a client: OpenAI's error object, the HTTP status, `Retry-After`."""

import math

import msgspec

from services.gateway.answers import UsageBody
from shared.errors import DeadlineExceeded
from shared.messages import ErrorInfo

_RETRY_AFTER_S = 1.0


class RequestFailed(Exception):
    """One request failed for a reason that came through the mesh."""

    def __init__(self, error: ErrorInfo, request_id: str | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.request_id = request_id


class ErrorBody(msgspec.Struct):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None

    @staticmethod
    def of(error: ErrorInfo) -> "ErrorBody":
        """The error as a client sees it."""
        return ErrorBody(error.message, error.type, error.param, error.code)


class ErrorDocument(msgspec.Struct, omit_defaults=True):
    """What an answer that is an error consists of."""

    error: ErrorBody
    usage: UsageBody | None = None
    """Of a stream that fails after some output, if its client wants to know."""


def encode_error(error: ErrorInfo, usage: UsageBody | None = None) -> bytes:
    """The JSON document of an error."""
    return msgspec.json.encode(ErrorDocument(ErrorBody.of(error), usage))


def retry_after_s(error: ErrorInfo) -> float | None:
    """How long to wait before another try. Every 429 and 503 has an answer, whoever it comes from."""
    if error.retry_after_s is None and error.status in (429, 503):
        return _RETRY_AFTER_S
    return error.retry_after_s


def error_headers(error: ErrorInfo) -> dict[str, str]:
    """The headers that go with an error: when to try again, or not to, and how to authenticate."""
    headers = {}
    if (seconds := retry_after_s(error)) is not None:
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.code == DeadlineExceeded.code:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients repeat a 504 by themselves, beyond the time they gave
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers
