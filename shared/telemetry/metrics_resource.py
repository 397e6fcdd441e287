"""Whose metrics they are, in OpenTelemetry's terms. Needs the extra `telemetry`."""

import contextlib
from importlib.metadata import PackageNotFoundError, version

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from shared.actor import Identity


def resource_of(identity: Identity) -> dict[str, str]:
    """What is said of an instance, with what OpenTelemetry's library says of itself. What `OTEL_SERVICE_NAME` and
    `OTEL_RESOURCE_ATTRIBUTES` say outweighs all else."""
    attributes = {
        "service.name": f"shoal-{identity.service}",
        "service.instance.id": str(identity.instance_id),
        "shoal.instance.name": identity.name,
    }
    with contextlib.suppress(PackageNotFoundError):  # its code was copied, as in an image
        attributes["service.version"] = version("shoal")
    whole = Resource.create(dict(attributes)).merge(OTELResourceDetector().detect())
    return {name: str(value) for name, value in whole.attributes.items()}
