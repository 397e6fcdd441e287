"""Whether anything is sent over OTLP, and where spans go, and how: OpenTelemetry's own variables, as its specification
has them.

What is set for traces alone (`OTEL_EXPORTER_OTLP_TRACES_…`) outweighs what is set for everything
(`OTEL_EXPORTER_OTLP_…`). Without an endpoint nothing is exported. Everything is checked at start.
"""

import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.log import without_passwords
from shared.telemetry.resource import pairs_in, said_of_resource

T = TypeVar("T")

_PREFIXES: Final = ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
_PROTOCOL: Final = "http/protobuf"
_DEFAULT_TIMEOUT_MS: Final = "10000"


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """How to reach a collector."""

    endpoint: str
    """The whole address that spans are posted to."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0
    """For one batch, with all tries."""
    has_gzip: bool = False
    tls: ssl.SSLContext | None = None
    """None for what the platform trusts."""
    resource: Mapping[str, str] = field(default_factory=dict)
    """What the environment says of this process."""


def is_sent(environ: Mapping[str, str], signal: str) -> bool:
    """Whether TRACES, or METRICS, are to be sent over OTLP: there is somewhere to send them to, and it is not switched
    off. A variable that is empty is as good as none."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get(f"OTEL_{signal}_EXPORTER", "").strip() == "none":
        return False
    endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return any(environ.get(name, "").strip() for name in endpoints)


def otlp_settings(environ: Mapping[str, str]) -> OtlpSettings | None:
    """What the environment says; None if nothing is to be exported. Raises ConfigError that names what is wrong."""
    if not is_sent(environ, "TRACES"):
        return None
    _read(environ, "PROTOCOL", _PROTOCOL, _check_protocol)
    return OtlpSettings(
        endpoint=_endpoint(environ),
        headers=_read(environ, "HEADERS", "", pairs_in, is_secret=True),
        timeout_s=_read(environ, "TIMEOUT", _DEFAULT_TIMEOUT_MS, _seconds),
        has_gzip=_read(environ, "COMPRESSION", "none", _is_gzip),
        tls=_tls(environ),
        resource=said_of_resource(environ),
    )


def _endpoint(environ: Mapping[str, str]) -> str:
    """One for traces is used as it is; to a general one, the path of traces is added."""
    own, general = (f"{prefix}ENDPOINT" for prefix in _PREFIXES)
    if text := environ.get(own, "").strip():
        return _checked(own, text, _address)
    return _checked(general, environ[general].strip(), _address) + "/v1/traces"


def _address(text: str) -> str:
    url = urlsplit(text)
    _ = url.port  # raises ValueError if it is none
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be an address such as http://127.0.0.1:4318")
    return text.rstrip("/")


def _check_protocol(text: str) -> None:
    if text != _PROTOCOL:
        raise ValueError(f"spans are exported as {_PROTOCOL} only")


def _seconds(text: str) -> float:
    milliseconds = float(text)
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise ValueError("must be a number of milliseconds above 0")
    return milliseconds / 1000


def _is_gzip(text: str) -> bool:
    if text not in ("gzip", "none"):
        raise ValueError("must be gzip or none")
    return text == "gzip"


def _tls(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    authority, certificate, key = (
        _read(environ, name, "", str) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    )
    if not authority and not certificate:
        return None
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except OSError as error:  # also what is wrong with what is in the files
        raise ConfigError(f"{_PREFIXES[1]}CERTIFICATE, CLIENT_CERTIFICATE or CLIENT_KEY: {error}") from error
    return context


def _read(
    environ: Mapping[str, str], name: str, default: str, parse: Callable[[str], T], *, is_secret: bool = False
) -> T:
    """The value of the first variable with this ending that is set."""
    for variable in (prefix + name for prefix in _PREFIXES):
        if text := environ.get(variable, "").strip():
            return _checked(variable, text, parse, is_secret=is_secret)
    return parse(default)


def _checked(variable: str, text: str, parse: Callable[[str], T], *, is_secret: bool = False) -> T:
    try:
        return parse(text)
    except ValueError as error:
        shown = "(hidden)" if is_secret else repr(without_passwords(text))
        raise ConfigError(f"{variable}={shown}: {error}") from None
