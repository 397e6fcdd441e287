"""The question whether a service works, as a container's health check asks it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared import health


def _ask(*arguments: str, **environ: str) -> tuple[int, str]:
    """Exit status and complaint of `python -m shared.health`."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "shared.health", *arguments],
        env={"PATH": os.environ["PATH"]} | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_a_file_that_was_just_touched_is_healthy(tmp_path: Path) -> None:
    file = tmp_path / "healthy"
    health.touch(file)
    assert health.complaint(file, time.time()) is None
    assert _ask(SHOAL_HEALTH_FILE=str(file)) == (0, "")


@pytest.mark.parametrize(
    ("age_s", "is_healthy"), [(health.STALE_AFTER_S - 0.1, True), (health.STALE_AFTER_S + 0.1, False)]
)
def test_a_file_is_healthy_for_as_long_as_its_limit_says(tmp_path: Path, age_s: float, is_healthy: bool) -> None:
    file = tmp_path / "healthy"
    health.touch(file)
    os.utime(file, (1_000.0, 1_000.0))
    assert (health.complaint(file, 1_000.0 + age_s) is None) == is_healthy


def test_touching_again_makes_a_stale_file_healthy(tmp_path: Path) -> None:
    file = tmp_path / "healthy"
    file.touch()
    os.utime(file, (1.0, 1.0))
    assert _ask(SHOAL_HEALTH_FILE=str(file))[0] == 1
    health.touch(file)
    assert _ask(SHOAL_HEALTH_FILE=str(file)) == (0, "")


def test_a_process_that_has_not_started_yet_is_not_healthy(tmp_path: Path) -> None:
    status, complaint = _ask(SHOAL_HEALTH_FILE=str(tmp_path / "healthy"))
    assert status == 1
    assert complaint.startswith("not started: ")


def test_without_the_setting_the_question_cannot_be_answered() -> None:
    assert _ask() == (1, "SHOAL_HEALTH_FILE is not set\n")


def test_a_process_that_cannot_work_is_alive_as_long_as_it_says_so(tmp_path: Path) -> None:
    file = tmp_path / "healthy"
    health.touch(health.alive_file(file))
    assert _ask("--alive", SHOAL_HEALTH_FILE=str(file)) == (0, "")
    assert _ask(SHOAL_HEALTH_FILE=str(file))[0] == 1


@pytest.mark.parametrize(("age_s", "is_alive"), [(health.STUCK_AFTER_S - 0.1, True), (health.STUCK_AFTER_S + 1, False)])
def test_a_process_that_came_to_nothing_for_too_long_is_stuck(tmp_path: Path, age_s: float, is_alive: bool) -> None:
    file = tmp_path / "healthy"
    health.touch(health.alive_file(file))
    os.utime(health.alive_file(file), (1_000.0, 1_000.0))
    assert (health.complaint_of_life(file, 1_000.0 + age_s) is None) == is_alive


def test_a_process_that_never_said_anything_is_not_alive_yet(tmp_path: Path) -> None:
    status, complaint = _ask("--alive", SHOAL_HEALTH_FILE=str(tmp_path / "healthy"))
    assert status == 1
    assert complaint.startswith("not started: ")


def test_a_question_that_is_none_is_refused(tmp_path: Path) -> None:
    health.touch(tmp_path / "healthy")
    assert _ask("--aliv", SHOAL_HEALTH_FILE=str(tmp_path / "healthy"))[0] == 1
