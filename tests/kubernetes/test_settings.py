"""What the manifests tell services is what these take: each is told as a container would be, and its settings read."""

import importlib
from typing import Final

import pytest

from shared.config import Config, MeshConfig, load, variable
from tests.kubernetes.manifests import BUILDS, SERVICES, build, environ, main_container, pods

_LIKELY: Final = {
    "SHOAL_INSTANCE_NAME": "executor-5d9c7b",
    "SHOAL_GATEWAY_API_KEYS": "default:0123456789",
    "SHOAL_EXECUTOR_THREADS": "4",
    "NATS_PASSWORD": "5ecret",
    "OMP_NUM_THREADS": "4",
}
"""What Secrets and nodes say."""
_NOT_READ_YET: Final = {"SHOAL_METRICS_PORT"}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_takes_all_that_it_is_told(name: str, service: str) -> None:
    objects = build(name)
    told = environ(objects, main_container(pods(objects)[service]))
    told = {key: _LIKELY[key] if value == "?" else value for key, value in told.items() if key not in _NOT_READ_YET}
    told["SHOAL_NATS_URL"] = told["SHOAL_NATS_URL"].replace("$(NATS_PASSWORD)", told["NATS_PASSWORD"])
    for kind in (MeshConfig, _kind(service)):
        load(kind, told)


def test_what_is_read_by_now_is_read_above() -> None:
    assert not _NOT_READ_YET & {variable(MeshConfig, field) for field in MeshConfig.__dataclass_fields__}


def _kind(service: str) -> type[Config]:
    kind: type[Config] = getattr(importlib.import_module(f"services.{service}.config"), f"{service.title()}Config")
    return kind
