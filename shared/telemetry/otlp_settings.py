"""Where spans and metrics are sent to, and how: OpenTelemetry's own variables, as its specification has them.

What is set for one of them alone (`OTEL_EXPORTER_OTLP_TRACES_…`, `…_METRICS_…`) outweighs what is set for both
(`OTEL_EXPORTER_OTLP_…`). Without an endpoint nothing is sent. Everything is checked at start.
"""

import math
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final, TypeVar
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.log import without_passwords
from shared.telemetry.resource import pairs_in

T = TypeVar("T")

_PROTOCOL: Final = "http/protobuf"
_DEFAULT_TIMEOUT_MS: Final = "10000"
_DEFAULT_INTERVAL_MS: Final = "60000"
_PREFIX: Final = "OTEL_EXPORTER_OTLP_"


class Signal(Enum):
    """What can be sent; the value is its name in variables."""

    TRACES = "TRACES"
    METRICS = "METRICS"

    @property
    def prefixes(self) -> tuple[str, str]:
        """How variables begin that are about it alone, and those about everything."""
        return f"{_PREFIX}{self.value}_", _PREFIX


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """How to reach a collector."""

    endpoint: str
    """The whole address that is posted to."""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 10.0
    """For one batch, with all tries."""
    has_gzip: bool = False
    tls: ssl.SSLContext | None = None
    """None for what the platform trusts."""


def otlp_settings(environ: Mapping[str, str], signal: Signal) -> OtlpSettings | None:
    """What the environment says; None if nothing is to be sent: there is nowhere to send it to, or that is switched
    off. A variable that is empty is as good as none. Raises ConfigError that names what is wrong."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if environ.get(f"OTEL_{signal.value}_EXPORTER", "").strip() == "none":
        return None
    if (endpoint := _endpoint(environ, signal)) is None:
        return None
    said = partial(_read, environ, signal)
    said("PROTOCOL", _PROTOCOL, _check_protocol)
    return OtlpSettings(
        endpoint=endpoint,
        headers=said("HEADERS", "", pairs_in, is_secret=True),
        timeout_s=said("TIMEOUT", _DEFAULT_TIMEOUT_MS, _seconds),
        has_gzip=said("COMPRESSION", "none", _is_gzip),
        tls=_tls(environ, signal),
    )


def interval_s(environ: Mapping[str, str]) -> float:
    """How often metrics are to be sent, in seconds. Raises ConfigError if that is no time."""
    name = "OTEL_METRIC_EXPORT_INTERVAL"
    return _checked(name, environ.get(name, "").strip() or _DEFAULT_INTERVAL_MS, _seconds)


def _endpoint(environ: Mapping[str, str], signal: Signal) -> str | None:
    """One of its own is used as it is; to a general one, the path of the signal is added."""
    for prefix, path in zip(signal.prefixes, ("", f"/v1/{signal.value.lower()}"), strict=True):
        name = f"{prefix}ENDPOINT"
        if text := environ.get(name, "").strip():
            return _checked(name, text, _address) + path
    return None


def _address(text: str) -> str:
    url = urlsplit(text)
    _ = url.port  # raises ValueError if it is none
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be an address such as http://127.0.0.1:4318")
    return text.rstrip("/")


def _check_protocol(text: str) -> None:
    if text != _PROTOCOL:
        raise ValueError(f"only {_PROTOCOL} is spoken")


def _seconds(text: str) -> float:
    milliseconds = float(text)
    if not math.isfinite(milliseconds) or milliseconds <= 0:
        raise ValueError("must be a number of milliseconds above 0")
    return milliseconds / 1000


def _is_gzip(text: str) -> bool:
    if text not in ("gzip", "none"):
        raise ValueError("must be gzip or none")
    return text == "gzip"


def _tls(environ: Mapping[str, str], signal: Signal) -> ssl.SSLContext | None:
    authority, certificate, key = (
        _read(environ, signal, name, "", str) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY")
    )
    if not authority and not certificate:
        return None
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except OSError as error:  # also what is wrong with what is in the files
        raise ConfigError(f"{_PREFIX}CERTIFICATE, CLIENT_CERTIFICATE or CLIENT_KEY: {error}") from error
    return context


def _read(
    environ: Mapping[str, str],
    signal: Signal,
    name: str,
    default: str,
    parse: Callable[[str], T],
    *,
    is_secret: bool = False,
) -> T:
    """The value of the first variable with this ending that is set."""
    for variable in (prefix + name for prefix in signal.prefixes):
        if text := environ.get(variable, "").strip():
            return _checked(variable, text, parse, is_secret=is_secret)
    return parse(default)


def _checked(variable: str, text: str, parse: Callable[[str], T], *, is_secret: bool = False) -> T:
    try:
        return parse(text)
    except ValueError as error:
        shown = "(hidden)" if is_secret else repr(without_passwords(text))
        raise ConfigError(f"{variable}={shown}: {error}") from None
