"""Whose metrics and spans they are, in OpenTelemetry's terms: the attributes of a resource. Needs no package."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import unquote

from shared.actor import Identity
from shared.errors import ConfigError


def resource_of(identity: Identity, said: Mapping[str, str]) -> dict[str, str]:
    """What is said of an instance. What its environment has `said` (`said_of_resource`) outweighs all else."""
    attributes = {
        "service.name": f"shoal-{identity.service}",
        "service.instance.id": str(identity.instance_id),
        "shoal.instance.name": identity.name,
    }
    if (own := version_of_shoal()) is not None:
        attributes["service.version"] = own
    return attributes | dict(said)


def version_of_shoal() -> str | None:
    """The version that runs; None where its code was copied without saying which it is."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return None


def said_of_resource(environ: Mapping[str, str]) -> dict[str, str]:
    """What `OTEL_RESOURCE_ATTRIBUTES` and `OTEL_SERVICE_NAME` say. Raises ConfigError if it is not readable."""
    name = "OTEL_RESOURCE_ATTRIBUTES"
    text = environ.get(name, "")
    try:
        said = pairs_in(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: {error}") from None
    if service := environ.get("OTEL_SERVICE_NAME", "").strip():
        said["service.name"] = service
    return said


def pairs_in(text: str) -> dict[str, str]:
    """`key=value` pairs with commas between them; values are percent-encoded. Raises ValueError if it is not so."""
    pairs = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = item.partition("=")
        if not (equals and key.strip()):
            raise ValueError("must be key=value pairs with commas between them")
        pairs[key.strip()] = unquote(value.strip())
    return pairs
