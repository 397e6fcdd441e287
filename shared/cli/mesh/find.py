"""Which mesh a command means: the one named, or the only one that runs here."""

from collections.abc import Mapping
from pathlib import Path

from shared import config as settings
from shared.cli.mesh.state import MeshFolder, MeshState, running_meshes
from shared.config import MeshConfig
from shared.errors import OperatorError


def home_folder(home: Path | None, environ: Mapping[str, str]) -> Path:
    """The folder for models and state: the one named, else what the environment says."""
    return (home or settings.load(MeshConfig, environ).home).expanduser().absolute()


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
        raise OperatorError(f"several meshes run here, on ports {', '.join(str(m.port) for m in meshes)}; name one")
    return meshes[0] if meshes else None
