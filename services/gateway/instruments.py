"""Every metric of a gateway, with where its numbers are read."""

from collections import Counter

from services.gateway.http import HttpServer
from services.gateway.mesh import Mesh
from shared.ids import Service
from shared.telemetry.metrics import Instrument, Kind, Reading


def gateway_instruments(mesh: Mesh, server: HttpServer) -> list[Instrument]:
    """The instruments of one gateway."""
    metrics, requests = mesh.metrics, mesh.requests
    return [
        *metrics.histograms,
        Reading(
            "shoal.gateway.requests.opened",
            Kind.COUNTER,
            "{request}",
            "Requests to the mesh that were admitted",
            lambda: metrics.opened.counts,
            ("operation",),
        ),
        Reading(
            "shoal.gateway.requests",
            Kind.COUNTER,
            "{request}",
            "Requests that have ended, or were refused",
            lambda: metrics.ended.counts,
            ("operation", "ending", "code"),
        ),
        Reading("shoal.gateway.requests.open", Kind.SUM, "{request}", "Open requests", lambda: len(requests)),
        Reading(
            "shoal.gateway.requests.detached",
            Kind.SUM,
            "{request}",
            "Open requests that nobody reads",
            lambda: requests.num_detached,
        ),
        Reading(
            "shoal.gateway.tenant.requests",
            Kind.COUNTER,
            "{request}",
            "Requests of each tenant that have ended",
            lambda: metrics.tenant_requests.counts,
            ("tenant", "ending"),
        ),
        Reading(
            "shoal.gateway.tenant.tokens",
            Kind.COUNTER,
            "{token}",
            "Tokens of each tenant's requests that have ended",
            lambda: metrics.tenant_tokens.counts,
            ("tenant", "type"),
        ),
        Reading(
            "shoal.gateway.connections",
            Kind.SUM,
            "{connection}",
            "Open connections of clients",
            lambda: {"http": server.num_connections - server.num_sockets, "websocket": server.num_sockets},
            ("protocol",),
        ),
        Reading(
            "shoal.gateway.connections.cut_off",
            Kind.COUNTER,
            "{connection}",
            "Connections closed because the client did not read",
            lambda: server.num_cut_off,
        ),
        Reading(
            "shoal.gateway.disconnects",
            Kind.COUNTER,
            "{request}",
            "Requests whose client left before the end",
            lambda: mesh.num_disconnects,
        ),
        Reading(
            "shoal.gateway.resumptions",
            Kind.COUNTER,
            "{request}",
            "Requests that a client came back for",
            lambda: metrics.resumed.counts,
            ("place",),
        ),
        Reading(
            "shoal.gateway.resubmissions",
            Kind.COUNTER,
            "{request}",
            "Requests sent once more",
            lambda: {"unanswered": requests.num_repeated, "moved": requests.handover.num_resubmitted},
            ("reason",),
        ),
        Reading(
            "shoal.gateway.replays",
            Kind.COUNTER,
            "{request}",
            "Times a scheduler was asked for what may be lost",
            lambda: requests.num_questions,
        ),
        Reading(
            "shoal.gateway.messages.orphaned",
            Kind.COUNTER,
            "{message}",
            "Messages about requests that are not open, or of earlier attempts",
            lambda: requests.num_orphans,
        ),
        Reading(
            "shoal.gateway.usage.unrecorded",
            Kind.SUM,
            "{request}",
            "Ended requests of whose usage the broker has no record",
            lambda: mesh.usage.num_unrecorded,
        ),
        Reading(
            "shoal.gateway.instances",
            Kind.GAUGE,
            "{instance}",
            "Instances that are heard",
            lambda: _instances(mesh),
            ("service", "state"),
        ),
        Reading(
            "shoal.gateway.ready",
            Kind.GAUGE,
            "1",
            "Whether a request for the model would be served",
            lambda: _ready(mesh),
            ("model",),
        ),
    ]


def _instances(mesh: Mesh) -> dict[tuple[str, ...], float]:
    beats = (beat for service in Service for beat in mesh.directory.alive(service))
    return dict(Counter((str(beat.service), "draining" if beat.is_draining else "up") for beat in beats))


def _ready(mesh: Mesh) -> dict[str, float]:
    is_open = mesh.transport.is_connected and not mesh.is_draining
    return {model: is_open and not mesh.admission.missing(model) for model in mesh.admission.known_models()}
