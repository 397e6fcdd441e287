"""What counts as an end that nobody brought about."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.cli.mesh.ports import free_port
from shared.ids import Service
from tests.chaos.mesh import Instance, catches

WITHIN_S = 30.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what a process catches is read from /proc")


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    """A gateway that waits for its broker; not yet started."""
    settings = {"SHOAL_NATS_URL": f"nats://127.0.0.1:{free_port()}", "SHOAL_GATEWAY_PORT": "0"}
    own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    instance = Instance(Service.GATEWAY, 1, own | settings, tmp_path / "gateway-1.log")
    yield instance
    instance.kill()
    instance.wait(WITHIN_S)


def until_it_listens_to_signals(instance: Instance) -> None:
    assert instance.process_id is not None
    deadline = time.monotonic() + WITHIN_S
    while not catches(instance.process_id, signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_sigterm_may_end_a_process_that_is_still_being_loaded(instance: Instance) -> None:
    instance.start()
    instance.terminate()
    instance.wait(WITHIN_S)
    assert instance.unexpected_end() is None


def test_a_process_that_was_told_to_stop_ends_by_itself(instance: Instance) -> None:
    instance.start()
    until_it_listens_to_signals(instance)
    instance.terminate()
    instance.wait(WITHIN_S)
    assert instance.unexpected_end() is None


def test_what_was_told_to_stop_may_end_of_nothing_else(instance: Instance) -> None:
    """As if a supervisor had lost its patience."""
    instance.start()
    until_it_listens_to_signals(instance)
    assert instance.process_id is not None
    instance.freeze()
    instance.terminate()
    os.kill(instance.process_id, signal.SIGKILL)
    instance.wait(WITHIN_S)
    assert "gateway-1 ended by itself with status -9" in (instance.unexpected_end() or "")
