"""`pull` when something goes wrong: no half a model, nothing fetched twice, a sentence that says why."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models import pull as pull_module
from shared.models.fetch.disk import NoRoom
from shared.models.fetch.patience import Patience
from shared.models.manifest import Manifest
from shared.models.pull import Terms, pull
from shared.models.store import ModelStore
from tests.models.file_server import FileServer
from tests.models.pulling import Listener, assert_nothing_is_left, files_of, long
from tests.models.test_archive import make_zip


def test_an_interrupted_pull_leaves_no_model_and_goes_on_where_it_was(
    store: ModelStore, terms: Terms, file_server: FileServer, gguf_file: Path
) -> None:
    file_server.files["x.gguf"] = long(gguf_file)
    file_server.breaks["x.gguf"].append(1_000_000)
    with pytest.raises(ModelError, match="broke off"):
        pull(store, f"{file_server.url}/x.gguf", terms=Terms(patience=Patience(max_failures=0)))
    assert not store.has("x")
    assert not store.list()
    arrived = (store.partial("x") / "downloads" / "x.gguf.part").stat().st_size
    assert arrived > 0
    file_server.requests.clear()
    pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert file_server.ranges("x.gguf") == [f"bytes={arrived}-"]
    assert_nothing_is_left(store)


def test_what_another_source_left_is_not_mixed_in(
    store: ModelStore, terms: Terms, file_server: FileServer, gguf_file: Path
) -> None:
    file_server.files |= {"x.gguf": long(gguf_file), "a/x.gguf": long(gguf_file)}
    file_server.breaks["x.gguf"].append(1_000_000)
    with pytest.raises(ModelError):
        pull(store, f"{file_server.url}/x.gguf", terms=Terms(patience=Patience(max_failures=0)))
    pull(store, f"{file_server.url}/a/x.gguf", terms=terms)
    assert file_server.ranges("a/x.gguf") == [None]
    assert store.manifest("x").source.endswith("/a/x.gguf")


def test_a_wrong_checksum_installs_nothing(
    store: ModelStore, terms: Terms, file_server: FileServer, gguf_file: Path
) -> None:
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    with pytest.raises(ModelError, match="checksum is wrong"):
        pull(store, f"{file_server.url}/x.gguf#sha256={'0' * 64}", terms=terms)
    assert not store.has("x")


def test_a_crash_between_download_and_installation_leaves_no_model_and_no_second_download(
    store: ModelStore,
    terms: Terms,
    file_server: FileServer,
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file_server.files["x.gguf"] = gguf_file.read_bytes()

    def crash(*_arguments: object, **_options: object) -> Manifest:
        raise SystemExit

    monkeypatch.setattr(ModelStore, "add", crash)
    with pytest.raises(SystemExit):
        pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert not store.has("x")
    monkeypatch.undo()
    file_server.requests.clear()
    pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert file_server.ranges("x.gguf") == []
    store.verify("x")


def test_a_model_that_cannot_be_served_is_not_installed(store: ModelStore, terms: Terms, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense")
    for source, complaint in (
        (str(tmp_path / "x.gguf"), "GGUF file of version"),
        (str(tmp_path / "y.gguf"), "does not exist"),
        (str(tmp_path / "nothing"), "does not exist"),
        (str(tmp_path / "home"), "is not a model"),
    ):
        with pytest.raises(ModelError, match=complaint):
            pull(store, source, name="x", terms=terms)
    assert not store.has("x")


def test_a_pull_that_fails_before_anything_arrives_leaves_nothing(
    store: ModelStore, terms: Terms, file_server: FileServer, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for source in (f"{file_server.url}/x.gguf", f"{file_server.url}/folder", str(tmp_path / "empty"), "/nothing/here"):
        with pytest.raises(ModelError):
            pull(store, source, name="x", terms=terms)
        assert_nothing_is_left(store)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><p>Log in first", b"GGUF\3\0\0\0", b"GGUF nonsense"])
def test_what_is_served_as_a_model_and_is_none_is_told_of_by_its_source_and_not_kept(
    store: ModelStore, terms: Terms, file_server: FileServer, tmp_path: Path, content: bytes
) -> None:
    file_server.files["x.gguf"] = content
    archive = make_zip(tmp_path / "z.zip", {"inside/x.gguf": content})
    file_server.files["z.zip"] = archive.read_bytes()
    for source, named in (("x.gguf", "x.gguf"), ("z.zip", "z.zip/x.gguf")):
        with pytest.raises(ModelError) as caught:
            pull(store, f"{file_server.url}/{source}", terms=terms)
        assert str(caught.value).startswith(f"{file_server.url}/{named} is ")
        assert str(store.home) not in str(caught.value)
        assert_nothing_is_left(store)


def test_a_folder_that_cannot_be_served_is_told_of_by_its_source(
    store: ModelStore, terms: Terms, file_server: FileServer, model_folder: Path
) -> None:
    file_server.files |= {f"m/{name}": content for name, content in files_of(model_folder).items()}
    file_server.files["m/config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ModelError, match=rf"{file_server.url}/m/config\.json: .*MambaForCausalLM is not supported"):
        pull(store, f"{file_server.url}/m", terms=terms)


def test_what_arrived_is_kept_if_only_the_room_for_its_conversion_is_missing(
    store: ModelStore,
    terms: Terms,
    file_server: FileServer,
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_arguments: object) -> None:
        raise NoRoom("the disk is full")

    file_server.files["x.gguf"] = gguf_file.read_bytes()
    monkeypatch.setattr("shared.models.gguf_import.convert.require_space", refuse)
    with pytest.raises(NoRoom):
        pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert store.unfinished()["x"] >= gguf_file.stat().st_size
    monkeypatch.undo()
    file_server.requests.clear()
    pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert file_server.ranges("x.gguf") == []


@pytest.mark.parametrize("place", ["locks", "partial", "models"])
def test_a_store_that_cannot_be_written_is_a_sentence(
    store: ModelStore, terms: Terms, gguf_file: Path, place: str
) -> None:
    store.home.mkdir()
    (store.home / place).write_text("a file")
    with pytest.raises(
        ModelError, match=rf"{store.home / place}.* cannot be used: .*; choose another folder for models"
    ):
        pull(store, str(gguf_file), terms=terms)


def test_an_attempt_after_a_failure_is_announced(store: ModelStore, file_server: FileServer, gguf_file: Path) -> None:
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    file_server.statuses["x.gguf"].append(503)
    listener = Listener()
    pull(store, f"{file_server.url}/x.gguf", terms=Terms(progress=listener, patience=Patience(first_pause_s=0.001)))
    url = f"{file_server.url}/x.gguf"
    assert listener.sentences[0] == f"{url}: the server answered with status 503; trying again in 0.001 s"


def test_two_pulls_of_one_model_at_once_fetch_it_once(
    store: ModelStore, patience: Patience, file_server: FileServer, gguf_file: Path
) -> None:
    file_server.files["x.gguf"] = gguf_file.read_bytes()
    file_server.holds["x.gguf"] = 1000
    first, second = Listener(), Listener()
    was_present: dict[Listener, bool] = {}

    def run(listener: Listener) -> None:
        terms = Terms(progress=listener, patience=patience)
        was_present[listener] = pull(store, f"{file_server.url}/x.gguf", terms=terms).was_present

    threads = [threading.Thread(target=run, args=(listener,)) for listener in (first, second)]
    threads[0].start()
    _wait_until(lambda: file_server.ranges("x.gguf") == [None])
    threads[1].start()
    assert second.has_heard.wait(20)
    assert second.sentences == ["waiting for another pull of x"]
    file_server.release()
    for thread in threads:
        thread.join(30)
    assert was_present == {first: False, second: True}
    assert file_server.ranges("x.gguf") == [None]


@pytest.fixture
def start_pull(tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts `shoal pull` with the store of `store`."""
    processes: list[subprocess.Popen[str]] = []

    def start(source: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", "from shared.cli.main import main; main()", "pull", source]
        environment = {"SHOAL_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        root = Path(pull_module.__file__).parents[2]
        process = subprocess.Popen(
            command, env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_is_stopped_in_the_middle_goes_on_there(
    store: ModelStore,
    terms: Terms,
    file_server: FileServer,
    gguf_file: Path,
    start_pull: Callable[[str], "subprocess.Popen[str]"],
    number: signal.Signals,
) -> None:
    file_server.files["x.gguf"] = long(gguf_file)
    file_server.holds["x.gguf"] = 1_000_000
    process = start_pull(f"{file_server.url}/x.gguf")
    part = store.partial("x") / "downloads" / "x.gguf.part"
    _wait_until(lambda: part.exists() and part.stat().st_size > 500_000)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; the same command goes on from here" in errors
        assert "Traceback" not in errors
    assert not store.has("x")
    arrived = part.stat().st_size
    file_server.release()
    file_server.requests.clear()
    pull(store, f"{file_server.url}/x.gguf", terms=terms)
    assert file_server.ranges("x.gguf") == [f"bytes={arrived}-"]
    store.verify("x")
