"""Where spans are exported to: OpenTelemetry's own variables, as far as Shoal itself has to know them.

Without an endpoint nothing is exported. Everything else (headers, timeouts, certificates, attributes of the resource)
is read by OpenTelemetry's packages where they are used.
"""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from shared.actor import Identity
from shared.config import MeshConfig
from shared.errors import ConfigError
from shared.log import without_passwords
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Exporter, Tracing

log = logging.getLogger(__name__)

TRACES_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_IS_DISABLED: Final = "OTEL_SDK_DISABLED"
_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
_PACKAGE: Final = "opentelemetry.exporter.otlp.proto.http"


def tracing_of(identity: Identity, mesh: MeshConfig, environ: Mapping[str, str]) -> Tracing:
    """What a service traces with. Raises ConfigError if spans are to be sent where nothing can be sent to."""
    exporter = None
    if mesh.trace_sample_ratio > 0 and (endpoint := endpoint_in(environ)) is not None:
        exporter = _exporter(identity, endpoint)
    return Tracing(SpanStore(mesh.trace_store_requests), exporter, sample_ratio=mesh.trace_sample_ratio)


def endpoint_in(environ: Mapping[str, str]) -> str | None:
    """Where spans are to be sent; None: nowhere. Raises ConfigError that names the variable at fault."""
    if environ.get(_IS_DISABLED, "").strip().lower() == "true" or environ.get(_EXPORTER, "").strip() == "none":
        return None
    for name in (TRACES_ENDPOINT, ENDPOINT):
        if endpoint := environ.get(name, "").strip():
            _check(name, endpoint)
            _check_protocol(environ)
            return endpoint
    return None


def _check(name: str, endpoint: str) -> None:
    shown = without_passwords(endpoint)
    try:
        url = urlsplit(endpoint)
        _ = url.port
    except ValueError as error:
        raise ConfigError(f"{name}={shown!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{name}={shown!r}: must be an address such as http://127.0.0.1:4318")


def _check_protocol(environ: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        if protocol := environ.get(name, "").strip():
            if protocol != _PROTOCOL:
                raise ConfigError(f"{name}={protocol!r}: spans are exported as {_PROTOCOL} only")
            return


def _exporter(identity: Identity, endpoint: str) -> Exporter | None:
    try:
        is_there = importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        log.warning("spans are not exported: OpenTelemetry is not installed; pip install 'shoal[telemetry]'")
        return None
    from shared.telemetry.export import QueueExporter
    from shared.telemetry.otlp import OtlpSender

    log.info("spans are exported", extra={"endpoint": without_passwords(endpoint)})
    version = _version()
    resource = {
        "service.name": f"shoal-{identity.service}",
        "service.instance.id": identity.instance_id,
        "service.version": version,
        "shoal.instance.name": identity.name,
    }
    return QueueExporter(OtlpSender(resource, version))


def _version() -> str:
    try:
        return importlib.metadata.version("shoal")
    except importlib.metadata.PackageNotFoundError:  # run from its source, as in containers
        return "0"
