"""What the manifests tell services is what these take: each is told as a container would be, and its settings read."""

import re
from typing import Final

import pytest

from shared.config import MeshConfig, load
from tests.kubernetes.manifests import BUILDS, ROOT, SERVICES, build, environ, main_container, pods
from tests.kubernetes.settings import config_of

_LIKELY: Final = {
    "SHOAL_INSTANCE_NAME": "executor-5d9c7b",
    "SHOAL_GATEWAY_API_KEYS": "default:0123456789",
    "SHOAL_EXECUTOR_THREADS": "4",
    "NATS_PASSWORD": "5ecret",
    "OMP_NUM_THREADS": "4",
}
"""What Secrets and nodes say."""


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_takes_all_that_it_is_told(name: str, service: str) -> None:
    objects = build(name)
    told = _of_image() | environ(objects, main_container(pods(objects)[service]))
    told = {key: _LIKELY[key] if value == "?" else value for key, value in told.items()}
    told["SHOAL_NATS_URL"] = told["SHOAL_NATS_URL"].replace("$(NATS_PASSWORD)", told["NATS_PASSWORD"])
    for kind in (MeshConfig, config_of(service)):
        load(kind, told)


def test_who_sends_traces_does_not_send_metrics_too() -> None:
    objects = build("everything")
    for service in SERVICES:
        told = environ(objects, main_container(pods(objects)[service]))
        assert told["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4318")  # as the NetworkPolicy lets through
        assert told["OTEL_METRICS_EXPORTER"] == "none"


def _of_image() -> dict[str, str]:
    """What the Dockerfile says to every service."""
    return dict(re.findall(r"(SHOAL_(?!GATEWAY)\w+)=(\S+)", (ROOT / "Dockerfile").read_text()))
