"""What went wrong in a transfer: whether trying again may help, and a sentence for whoever ordered it.

obstore reports most faults as one type, so the HTTP status and the cause are read from its message.
"""

import re
from typing import Final

from obstore.exceptions import BaseError, GenericError, NotSupportedError

from shared.errors import ModelError

_STATUS: Final = re.compile(r"status code: (\d{3})")
_PASSING_STATUSES: Final = (408, 425, 429)
_METADATA_SERVICE: Final = "169.254."
"""Where machines in a cloud ask for credentials: tried when nothing else gave any."""
_ADDRESS: Final = re.compile(r"https?://[^\s,]*")
_UNTRUSTED: Final = re.compile("certificate", re.IGNORECASE)
_NOT_TLS: Final = re.compile(r"InvalidMessage|InvalidContentType")
_CAUSES: Final = (
    ("dns error", "its host name cannot be resolved; is there a network?"),
    ("Connection refused", "nothing answers there (connection refused)"),
    ("TimedOut", "it did not answer in time"),
    ("Timeout", "it did not answer in time"),
    ("IncompleteBody", "the connection broke off"),
    ("Network is unreachable", "the network is unreachable"),
    ("MissingContentLength", "the server does not say how large the file is, so it cannot be fetched safely"),
)


class Missing(ModelError):
    """The remote file does not exist (the server is there and says so)."""


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if not isinstance(error, GenericError):
        return False
    text = str(error)
    if _METADATA_SERVICE in text:
        return False
    status = _status(text)
    if status is not None:
        return status >= 500 or status in _PASSING_STATUSES
    words = _ADDRESS.sub("", text)
    if _UNTRUSTED.search(words) or _NOT_TLS.search(words):
        return False
    return "HttpError {" in words  # the connection failed or broke off


def is_about_range(error: BaseException) -> bool:
    """Whether the server refuses to send a part of the file (or the file has no such part)."""
    return isinstance(error, NotSupportedError) or _status(str(error)) == 416 or "InvalidRangeRequest" in str(error)


def explain(error: BaseException, url: str, access_hint: str) -> ModelError:
    """The sentence for a fault that is final. `access_hint` says how to get access to this kind of source."""
    text = str(error)
    status = _status(text)
    if isinstance(error, FileNotFoundError) or status == 404:
        return Missing(f"there is no such bucket: {url}" if "NoSuchBucket" in text else f"{url} does not exist (404)")
    if status in (401, 403):
        return ModelError(f"{url}: access denied ({status}); {access_hint}")
    if _METADATA_SERVICE in text:
        return ModelError(f"{url}: no credentials found; {access_hint}")
    if status is not None:
        return ModelError(f"{url}: the server answered with status {status}")
    words = _ADDRESS.sub("", text)  # an address may hold any word
    if _UNTRUSTED.search(words):
        return ModelError(f"{url} cannot be fetched: its certificate is not trusted, or not valid for that host")
    if _NOT_TLS.search(words):
        return ModelError(f"{url} cannot be fetched: what answers there does not speak HTTPS; is it http://…?")
    for mark, cause in _CAUSES:
        if mark in words:
            return ModelError(f"{url} cannot be fetched: {cause}")
    return ModelError(f"{url} cannot be fetched: {_first_line(text)}")


FAULTS: Final = (BaseError, FileNotFoundError, ValueError)
"""What obstore raises; ValueError for a path that it cannot express."""


def _status(text: str) -> int | None:
    match = _STATUS.search(text)
    return int(match[1]) if match else None


def _first_line(text: str) -> str:
    return text.partition("\n")[0].strip()
