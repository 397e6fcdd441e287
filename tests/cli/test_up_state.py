"""The file that says where a mesh is, and the lock that says whether it lives."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shared.cli.mesh.find import find_mesh
from shared.cli.mesh.state import MeshFolder, MeshState, running_meshes
from shared.errors import OperatorError

_CLAIM = """
import sys, time
from pathlib import Path
from shared.cli.mesh.state import MeshFolder, MeshState
folder = MeshFolder(Path(sys.argv[1]), int(sys.argv[2]))
with folder.claim():
    folder.write(MeshState("http://127.0.0.1:1", int(sys.argv[2]), "nats://x", "tiny", 1))
    print("claimed", flush=True)
    time.sleep(600)
"""


def _state(port: int) -> MeshState:
    return MeshState(f"http://127.0.0.1:{port}", port, "nats://127.0.0.1:4000", "tiny", os.getpid())


def test_a_mesh_is_found_while_it_runs_and_not_after(tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path, 8000)
    assert folder.running() is None
    with folder.claim():
        assert folder.running() is None
        folder.write(_state(8000))
        assert folder.running() == _state(8000)
        assert running_meshes(tmp_path) == [_state(8000)]
    assert folder.running() is None
    assert running_meshes(tmp_path) == []
    assert not (tmp_path / "run" / "8000.json").exists()


def test_a_second_mesh_on_the_port_is_refused_and_one_on_another_is_not(tmp_path: Path) -> None:
    first, second, other = MeshFolder(tmp_path, 8000), MeshFolder(tmp_path, 8000), MeshFolder(tmp_path, 8001)
    with first.claim():
        first.write(_state(8000))
        refusal = (
            f"a mesh runs on port 8000 already, started by process {os.getpid()}; stop it or choose another with --port"
        )
        with pytest.raises(OperatorError, match=refusal), second.claim():
            pass
        assert first.running() == _state(8000)
        with other.claim():
            other.write(_state(8001))
            assert [mesh.port for mesh in running_meshes(tmp_path)] == [8000, 8001]


def test_what_a_killed_mesh_left_is_known_to_be_stale(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(_CLAIM), str(tmp_path), "8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        folder = MeshFolder(tmp_path, 8000)
        assert folder.running() is not None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert folder.read() is not None
    assert folder.running() is None
    with folder.claim():
        assert folder.read() is None


def test_prometheus_finds_every_process_while_the_mesh_runs(tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path, 8000)
    with folder.claim():
        folder.write_targets({"gateway-1": "127.0.0.1:9001", "executor-1": "127.0.0.1:9002"})
        assert json.loads(folder.targets.read_text()) == [
            {"targets": ["127.0.0.1:9001"], "labels": {"name": "gateway-1"}},
            {"targets": ["127.0.0.1:9002"], "labels": {"name": "executor-1"}},
        ]
    assert not folder.targets.exists()
    assert not folder.folder.exists(), "nothing was kept"


def test_only_the_owner_can_read_where_the_mesh_is(tmp_path: Path) -> None:
    folder = MeshFolder(tmp_path, 8000)
    with folder.claim():
        folder.write(_state(8000))
        mode = (tmp_path / "run" / "8000.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"port": 8000}'])
def test_a_damaged_file_is_no_mesh(tmp_path: Path, content: bytes) -> None:
    folder = MeshFolder(tmp_path, 8000)
    with folder.claim():
        (tmp_path / "run" / "8000.json").write_bytes(content)
        assert folder.running() is None


def test_a_home_that_cannot_be_written_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OperatorError, match=r"cannot write to .*choose another --home"),
        MeshFolder(tmp_path / "file", 1).claim(),
    ):
        pass


def test_the_only_mesh_is_meant_and_of_several_one_must_be_named(tmp_path: Path) -> None:
    one, other = MeshFolder(tmp_path, 8000), MeshFolder(tmp_path, 8001)
    assert find_mesh(tmp_path, None) is None
    with one.claim():
        one.write(_state(8000))
        assert find_mesh(tmp_path, None) == find_mesh(tmp_path, 8000) == _state(8000)
        with pytest.raises(OperatorError, match="no mesh of `shoal up` runs on port 8001"):
            find_mesh(tmp_path, 8001)
        with other.claim():
            other.write(_state(8001))
            assert find_mesh(tmp_path, 8001) == _state(8001)
            with pytest.raises(OperatorError, match="on ports 8000, 8001"):
                find_mesh(tmp_path, None)
