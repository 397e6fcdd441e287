"""The error tree: whose fault, and how it looks to a client."""

from collections.abc import Iterator

import pytest

from shared import errors
from shared.codec import Decoder, encode
from shared.errors import Overloaded, PayloadTooLarge, RequestError, ShoalError
from shared.messages import ErrorInfo


def _subclasses(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


REQUEST_ERRORS = [error for error in _subclasses(RequestError) if error.__module__ == errors.__name__]


def test_everything_raised_on_purpose_has_one_root() -> None:
    own = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert len(own) > 15
    assert all(issubclass(error, ShoalError) for error in own)


@pytest.mark.parametrize("kind", REQUEST_ERRORS, ids=lambda kind: kind.__name__)
def test_a_request_error_travels_as_it_is(kind: type[RequestError]) -> None:
    error = kind("what is wrong", param="messages[0].role", retry_after_s=2.0)
    info = ErrorInfo.of(error)
    assert Decoder[ErrorInfo](ErrorInfo).decode(encode(info)) == info
    assert (info.status, info.type, info.code) == (kind.status, kind.type, kind.code)
    assert (info.message, info.param, info.retry_after_s) == ("what is wrong", "messages[0].role", 2.0)
    assert 400 <= info.status < 600


def test_the_statuses_are_those_of_the_contract() -> None:
    statuses = {kind.__name__: kind.status for kind in REQUEST_ERRORS}
    assert statuses == {
        "InvalidRequest": 400,
        "UnsupportedField": 400,
        "PromptTooLong": 400,
        "Unauthorized": 401,
        "NotFound": 404,
        "ModelNotFound": 404,
        "TooLarge": 413,
        "Overloaded": 429,
        "Unavailable": 503,
        "Stalled": 504,
        "DeadlineExceeded": 504,
    }


def test_request_errors_are_plain_sentences() -> None:
    assert str(Overloaded("the queue is full")) == "the queue is full"


def test_a_message_too_large_names_both_numbers() -> None:
    error = PayloadTooLarge("shoal.v1.x", 2048, 1024)
    assert (error.size, error.limit) == (2048, 1024)
    assert str(error) == "a message of 2048 bytes for shoal.v1.x exceeds the broker's limit of 1024 bytes"
