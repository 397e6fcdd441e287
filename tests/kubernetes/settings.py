"""The variables that services read, for tests of what is told to them."""

import importlib

from shared.config import Config, MeshConfig, explain
from shared.ids import Service


def config_of(service: str) -> type[Config]:
    """The settings of a service's own."""
    kind: type[Config] = getattr(importlib.import_module(f"services.{service}.config"), f"{service.title()}Config")
    return kind


def all_settings() -> set[str]:
    """The variables of every service."""
    kinds: list[type[Config]] = [MeshConfig, *map(config_of, Service)]
    return {name for kind in kinds for name, _default, _help in explain(kind)}
