"""Which mesh a command means: the one named, else the one on SHOAL_NATS_URL, else the only one that runs here."""

import os
from collections.abc import Mapping
from pathlib import Path

from shared import config as settings
from shared.cli.mesh.state import MeshFolder, MeshState, running_meshes
from shared.config import MeshConfig, check_nats_url
from shared.errors import OperatorError
from shared.log import without_passwords


def home_folder(home: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder for models and state: the one named, else what the environment says."""
    return (home or settings.load(MeshConfig, environ).home).expanduser().absolute()


def named_nats_url(environ: Mapping[str, str]) -> str | None:
    """The NATS server that the environment names; None if it names none. Raises ConfigError for one that is none."""
    name = settings.variable(MeshConfig, "nats_url")
    return settings.load(MeshConfig, environ).nats_url if name in environ else None


def nats_option(nats_url: str) -> str:
    """What `--nats-url` was given. Raises OperatorError if NATS has no such addresses."""
    try:
        check_nats_url(nats_url)
    except ValueError as error:
        raise OperatorError(f"--nats-url {without_passwords(nats_url)!r}: {error}") from None
    return nats_url


def find_mesh(home: Path, port: int | None) -> MeshState | None:
    """The mesh of `shoal up` on `port`, or the only one; None if none runs and none was named.

    Raises OperatorError if there is no mesh on that port, or if there are several to choose from.
    """
    if port is not None:
        if state := MeshFolder(home, port).running():
            return state
        raise OperatorError(f"no mesh of `shoal up` runs on port {port}; start one with `shoal up --port {port}`")
    meshes = running_meshes(home)
    if len(meshes) > 1:
        ports = ", ".join(str(mesh.port) for mesh in meshes)
        raise OperatorError(f"several meshes run here, on ports {ports}; name one with --port")
    return meshes[0] if meshes else None


def find_nats(nats_url: str | None, home: Path | None, port: int | None) -> str:
    """The NATS server of the mesh that is meant: what was said outweighs what is found."""
    if nats_url is not None:
        if port is not None:
            raise OperatorError("--port and --nats-url exclude each other")
        return nats_option(nats_url)
    if home is None and port is None and (named := named_nats_url(os.environ)) is not None:
        return named
    state = find_mesh(home_folder(home, os.environ), port)
    return state.nats_url if state else MeshConfig().nats_url
