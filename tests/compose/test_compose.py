"""compose.yaml on a real Docker engine, where there is one; see `tests.compose.trial` for what is tried."""

import os
import subprocess
import sys

import pytest

from tests.compose.docker import ROOT, why_not

_ASKED_BY = "TRY_COMPOSE"
"""Building images takes minutes and a package index, so that is done where this variable is set."""


@pytest.mark.mesh
@pytest.mark.timeout(3600)
def test_a_mesh_in_containers_streams_scales_and_survives_a_death_of_each_service() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(f"compose.yaml was NOT tried here: {reason}")
    if not os.environ.get(_ASKED_BY):
        pytest.skip("compose.yaml was NOT tried here: TRY_COMPOSE=1 builds the images and tries them")
    done = subprocess.run(
        [sys.executable, "-m", "tests.compose.trial", "--build"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
