"""compose.yaml on a real Docker engine, where there is one: see `tests.compose.trial` for what is tried, and chaos."""

import os
import subprocess
import sys

import pytest

from tests.compose.docker import ROOT, Project, fresh_passwords, why_not

_ASKED_BY = "TRY_COMPOSE"
"""Building images takes minutes and a package index, so that is done where this variable is set."""

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module", autouse=True)
def images() -> None:
    """All images, of this checkout."""
    if (reason := why_not()) is not None:
        pytest.skip(f"compose.yaml was NOT tried here: {reason}")
    if not os.environ.get(_ASKED_BY):
        pytest.skip("compose.yaml was NOT tried here: TRY_COMPOSE=1 builds the images and tries them")
    Project("shoal-images", dict(os.environ) | fresh_passwords()).compose("build", timeout_s=3600.0)


def _passes(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mesh_in_containers_streams_scales_and_survives_a_death_of_each_service() -> None:
    _passes("tests.compose.trial")


def test_chaos_among_containers_loses_no_stream() -> None:
    _passes("tests.chaos", "--compose", "--minutes", "2")
