"""Where compiled kernels are kept: a change of any of them must not leave old code in use."""

import os
from pathlib import Path

import pytest

from services.executor.kernels.jit import cache_folder
from shared.errors import OperatorError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "outer.py").write_text("calls inner")
    (folder / "inner.py").write_text("1")
    return folder


def test_a_change_of_any_source_gives_another_folder_and_removes_the_old_one(sources: Path) -> None:
    first = cache_folder(sources, {})
    (first / "compiled").touch()
    assert cache_folder(sources, {}) == first
    assert (first / "compiled").exists()
    (sources / "inner.py").write_text("2")
    second = cache_folder(sources, {})
    assert second != first
    assert second.is_dir()
    assert not first.exists()


def test_a_renamed_source_gives_another_folder(sources: Path) -> None:
    first = cache_folder(sources, {})
    (sources / "inner.py").rename(sources / "other.py")
    assert cache_folder(sources, {}) != first


def test_the_folder_is_where_the_environment_says(sources: Path, tmp_path: Path) -> None:
    assert cache_folder(sources, {"NUMBA_CACHE_DIR": str(tmp_path / "elsewhere")}).parent == tmp_path / "elsewhere"


def test_sources_that_cannot_be_written_leave_the_users_cache(sources: Path, tmp_path: Path) -> None:
    (sources / "__pycache__").touch()  # a file where the folder would be
    assert cache_folder(sources, {"XDG_CACHE_HOME": str(tmp_path / "cache")}).parent == tmp_path / "cache" / "shoal"


def test_nowhere_to_write_is_said(sources: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(OperatorError, match="name a folder that can be written in NUMBA_CACHE_DIR"):
        cache_folder(sources, {"NUMBA_CACHE_DIR": str(blocked)})


def test_the_kernels_of_this_process_are_kept_by_their_sources() -> None:
    import numba

    from services.executor.kernels import jit

    assert str(cache_folder(Path(jit.__file__).parent, os.environ)) == numba.config.CACHE_DIR
