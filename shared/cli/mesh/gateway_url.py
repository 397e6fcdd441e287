"""Which gateway a command means: the one named, else one of the mesh that is meant."""

import asyncio
import os
from pathlib import Path
from typing import Final

from shared.cli.mesh import readiness
from shared.cli.mesh.find import find_mesh, home_folder, named_nats_url
from shared.cli.mesh.state import MeshFolder
from shared.cli.mesh.watch import find_gateway

_DEFAULT_URL: Final = "http://127.0.0.1:8000"
_CONNECT_TIMEOUT_S: Final = 3.0


def find_gateway_url(home: Path | None, port: int | None) -> str:
    """The address of the gateway that is meant: what was said outweighs what is found.

    Raises OperatorError if there are several meshes to choose from, or none where one was named.
    """
    folder = home_folder(home, os.environ)
    if port is not None:  # it may also be one that `shoal up` did not start, or not as its first
        mesh = MeshFolder(folder, port).running()
        return mesh.address if mesh else readiness.address("127.0.0.1", port)
    if home is None and (nats_url := named_nats_url(os.environ)) is not None:
        return asyncio.run(find_gateway(nats_url, timeout_s=_CONNECT_TIMEOUT_S))
    mesh = find_mesh(folder, None)
    return mesh.address if mesh else _DEFAULT_URL
