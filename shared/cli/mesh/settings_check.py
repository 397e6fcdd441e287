"""Whether the environment suits every service, found out before one of them is started.

The services are known here by name only: a process of its own imports the `config` of each, which takes a tenth of a
second, where asking the services themselves would take one.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from shared import config as settings
from shared.config import Config, MeshConfig
from shared.errors import ConfigError
from shared.ids import Service


def check_settings(environ: Mapping[str, str]) -> None:
    """Raises ConfigError that names every offending variable, of all services at once."""
    command = [sys.executable, "-P", "-m", __name__]
    result = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the settings could not be checked: {result.stderr}")
    if problems := result.stdout.splitlines():
        raise ConfigError("; ".join(problems))


def config_of(service: Service) -> type[Config]:
    """The settings of a service, which are what its module `config` defines."""
    module = importlib.import_module(f"services.{service}.config")
    (kind,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Config) and value.__module__ == module.__name__
    )
    return kind


def find_problems(environ: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with the settings of the mesh and of each service, in sentences."""
    kinds: list[type[Config]] = [MeshConfig, *map(config_of, Service)]
    for kind in kinds:
        try:
            settings.load(kind, environ)
        except ConfigError as error:
            yield str(error)


if __name__ == "__main__":
    for problem in find_problems(os.environ):
        print(problem)
