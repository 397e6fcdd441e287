"""What a service traces with, put together from its settings and its environment.

Nothing of OpenTelemetry is imported where nothing is exported.
"""

import importlib.util
import logging
from collections.abc import Mapping
from typing import Final

from shared.actor import Identity
from shared.config import MeshConfig
from shared.log import without_passwords
from shared.telemetry.otlp_settings import OtlpSettings, Signal, otlp_settings
from shared.telemetry.resource import resource_of, said_of_resource, version_of_shoal
from shared.telemetry.store import SpanStore
from shared.telemetry.tracing import Exporter, Tracing

log = logging.getLogger(__name__)

_PACKAGE: Final = "opentelemetry.proto"


def tracing_of(identity: Identity, mesh: MeshConfig, environ: Mapping[str, str]) -> Tracing:
    """What a service traces with. Raises ConfigError if spans are to be exported and it is wrong how."""
    settings = otlp_settings(environ, Signal.TRACES)
    exporter = None
    if settings is not None and mesh.trace_sample_ratio > 0:
        exporter = _exporter(settings, resource_of(identity, said_of_resource(environ)))
    return Tracing(SpanStore(mesh.trace_store_requests), exporter, sample_ratio=mesh.trace_sample_ratio)


def _exporter(settings: OtlpSettings, resource: Mapping[str, str]) -> Exporter | None:
    try:
        is_there = importlib.util.find_spec(_PACKAGE) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        log.warning("spans are not exported: OpenTelemetry is not installed; pip install 'shoal[telemetry]'")
        return None
    from shared.telemetry.export import QueueExporter
    from shared.telemetry.otlp import OtlpSender

    log.info("spans are exported", extra={"endpoint": without_passwords(settings.endpoint)})
    return QueueExporter(OtlpSender(settings, resource, version_of_shoal() or "0"))
