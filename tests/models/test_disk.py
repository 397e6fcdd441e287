"""Room on the disk."""

import errno
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from shared.errors import ModelError
from shared.models.fetch.disk import explain_full_disk, require_space


class Usage(NamedTuple):
    """What the system says of a disk."""

    total: int
    used: int
    free: int


def test_too_little_room_is_noticed_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**12, 0, 5 * 10**9))
    require_space(tmp_path, 4 * 10**9, "the model")
    with pytest.raises(ModelError, match=r"the model needs 6 GB in .*, but only 5 GB are free there.*SHOAL_HOME"):
        require_space(tmp_path, 6 * 10**9, "the model")


def test_some_room_is_left_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10**12, 0, 10**9))
    with pytest.raises(ModelError):
        require_space(tmp_path, 10**9, "the model")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_explained(tmp_path: Path, number: int) -> None:
    with pytest.raises(ModelError, match="is full"), explain_full_disk(tmp_path):
        raise OSError(number, "no room")


def test_other_errors_of_the_system_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), explain_full_disk(tmp_path):
        raise PermissionError(errno.EACCES, "no")
