"""A mesh for all scenarios of this folder, and what its streams say when nothing happens."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from tests.chaos.mesh import ChaosMesh
from tests.chaos.model_home import make_home
from tests.chaos.progress import Record
from tests.chaos.runs import undisturbed_run
from tests.chaos.workload import StreamSpec, make_streams


@pytest.fixture(scope="package")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosMesh]:
    """Two processes of each service, running."""
    mesh = ChaosMesh(tmp_path_factory.mktemp("chaos"), make_home(tmp_path_factory.mktemp("home")))
    mesh.start()
    yield mesh
    mesh.stop()


@pytest.fixture(scope="package")
def specs() -> Sequence[StreamSpec]:
    """The streams of every scenario."""
    return make_streams(seed=7)


@pytest.fixture(scope="package")
def undisturbed(mesh: ChaosMesh, specs: Sequence[StreamSpec]) -> Sequence[Record]:
    """The same streams with nothing in their way."""
    return asyncio.run(undisturbed_run(mesh, specs))
