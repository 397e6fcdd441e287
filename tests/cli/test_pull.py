"""`shoal pull` as it is typed."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shared.cli.pull import command
from shared.errors import ModelError
from shared.models.store import ModelStore
from tests.cli.shoal import environ
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SHOAL_HOME, empty."""
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> str:
    """A GGUF file on this machine."""
    return str(write_tiny_gguf(tmp_path / "tiny.gguf", kind="Q4_1"))


def run(*arguments: str) -> Result:
    """The outcome of `shoal pull` with these arguments; its errors are raised, for `main` to print."""
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_a_pulled_model_is_described(home: Path, source: str) -> None:
    result = run(source, "--name", "org/tiny")
    folder = ModelStore(home).folder("org/tiny")
    assert result.exit_code == 0
    assert re.fullmatch(
        rf"org/tiny is ready: llama, [\d.]+k parameters, Q4_1, [\d.]+ kB, in {re.escape(str(folder))}\n", result.stdout
    )
    assert "importing org/tiny" in result.stderr
    assert run(source, "--name", "org/tiny").stdout.startswith("org/tiny is here already: llama, ")


def test_quiet_prints_nothing(home: Path, source: str) -> None:
    for _ in range(2):
        result = run("--quiet", source)
        assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert ModelStore(home).has("tiny")


def test_force_replaces_the_model(home: Path, source: str) -> None:
    run(source)
    before = ModelStore(home).folder("tiny").stat().st_ino
    run("--force", source)
    assert ModelStore(home).folder("tiny").stat().st_ino != before


def test_an_error_is_one_sentence_for_the_operator(home: Path) -> None:
    with pytest.raises(ModelError, match="is not a source"):
        run("nonsense")
    assert not home.exists()


def test_the_help_shows_every_kind_of_source() -> None:
    text = run("--help").stdout
    for kind in ("smollm2-135m", "organisation/name", "./folder", "pypi:", "s3://", "https://"):
        assert kind in text


@pytest.mark.parametrize(
    ("num_bytes", "said"),
    [(0, "interrupted; nothing is kept of it\n"), (1, "interrupted; the same command goes on from here\n")],
)
def test_interrupting_says_whether_it_can_go_on(
    home: Path, source: str, monkeypatch: pytest.MonkeyPatch, num_bytes: int, said: str
) -> None:
    def interrupt(store: ModelStore, *_arguments: object, **_options: object) -> None:
        downloads = store.partial("tiny") / "downloads"
        downloads.mkdir(parents=True)
        (downloads / "x.part").write_bytes(bytes(num_bytes))
        raise KeyboardInterrupt

    monkeypatch.setattr("shared.cli.pull.pull", interrupt)
    result = run(source)
    assert (result.exit_code, result.stderr) == (130, said)


def test_a_process_that_has_fetched_ends_at_once(home: Path) -> None:
    """obstore's threads may let go of Python objects in the last moment, which aborts a process that tears down."""
    code = "import atexit, obstore; atexit.register(print, 'torn down'); from shared.cli.main import main; main()"
    for arguments, status in ((["models"], 0), (["pull", "--quiet", "/nothing"], 2), (["pull"], 2)):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, env=environ(home), capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout + done.stderr
        assert "torn down" not in done.stdout


def test_what_is_there_already_needs_no_source_any_more(home: Path, source: str) -> None:
    run(source)
    shutil.move(source, f"{source}.away")
    assert run(source).exit_code == 0
