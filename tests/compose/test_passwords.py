"""The passwords of the broker's users, as `deploy/passwords.sh` makes them."""

import re
import stat
import subprocess
from pathlib import Path

from tests.compose.docker import ROOT


def _make(file: Path) -> None:
    subprocess.run(["sh", ROOT / "deploy/passwords.sh", file], check=True, capture_output=True)


def _lines(file: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in file.read_text().splitlines())


def test_every_password_that_compose_asks_for_is_made_and_no_two_are_alike(tmp_path: Path) -> None:
    _make(tmp_path / "env")
    asked_for = set(re.findall(r"\$\{(SHOAL_COMPOSE_\w+_PASSWORD)", (ROOT / "compose.yaml").read_text()))
    passwords = _lines(tmp_path / "env")
    assert set(passwords) == asked_for
    assert len(set(passwords.values())) == len(asked_for)
    assert all(re.fullmatch(r"[0-9a-f]{48}", password) for password in passwords.values())


def test_only_their_owner_can_read_them(tmp_path: Path) -> None:
    _make(tmp_path / "env")
    assert stat.S_IMODE((tmp_path / "env").stat().st_mode) == 0o600


def test_those_that_are_there_stay_and_so_does_everything_else(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("SHOAL_MODEL=tiny\n")
    _make(file)
    made = _lines(file)
    _make(file)
    assert _lines(file) == made
    assert made["SHOAL_MODEL"] == "tiny"


def test_the_files_of_the_project_hold_no_password_themselves() -> None:
    values = re.findall(r"password: (\S+)", (ROOT / "deploy/nats/users.conf").read_text())
    values += re.findall(r"_PASSWORD: (\S+)", (ROOT / "compose.yaml").read_text())
    values += re.findall(r"nats://\w+:(\S+)", (ROOT / "compose.yaml").read_text())
    assert len(values) == 6 + 6 + 6
    assert all(value.lstrip("'\"").startswith("$") for value in values)
