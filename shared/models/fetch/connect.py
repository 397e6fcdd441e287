"""Connections to object stores and web servers, with the same deadlines for all."""

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from obstore.exceptions import BaseError
from obstore.store import HTTPStore, from_url

from shared.errors import ModelError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

ACCESS_HINTS: Final = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true",
    "web": "if the address needs a signature or a password, it may be missing or expired",
}
_RETRY: Final["RetryConfig"] = {"max_retries": 0, "retry_timeout": timedelta(seconds=30)}
"""None below the transfer, which counts failures itself and knows what has arrived."""


def connect_web(base_url: str, *, authorization: str | None = None) -> "ObjectStore":
    """The files below a web address, whose query (a signature, say) goes with every request."""
    options = _options(allow_http=base_url.startswith("http://"))
    if authorization is not None:
        options["default_headers"] = {"accept-encoding": "identity", "authorization": authorization}
    return HTTPStore(base_url, client_options=options, retry_config=_RETRY)


def connect_bucket(url: str) -> "ObjectStore":
    """A bucket and prefix in an object store, with the credentials that its usual variables give.

    Raises ModelError if they are incomplete.
    """
    try:
        # Plain HTTP happens only if the operator sets an endpoint that is.
        return from_url(url, client_options=_options(allow_http=True), retry_config=_RETRY)
    except (BaseError, ValueError) as error:
        hint = ACCESS_HINTS[url.partition(":")[0]]
        raise ModelError(f"{url} cannot be opened: {str(error).partition(chr(10))[0]}; {hint}") from error


def _options(*, allow_http: bool) -> "ClientConfig":
    return {
        "allow_http": allow_http,
        "connect_timeout": "10s",
        "read_timeout": "30s",
        "timeout": "7days",
        "default_headers": {"accept-encoding": "identity"},
    }
