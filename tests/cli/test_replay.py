"""`shoal replay` as it is typed."""

import subprocess
from pathlib import Path

from click.testing import CliRunner

from shared.cli.forwarded import forwarded
from shared.errors import OperatorError
from tests.cli.shoal import environ, shoal
from tests.scheduler.storm import record_storm


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return shoal("replay", *arguments, env=environ(tmp_path))


def test_a_recording_is_replayed(tmp_path: Path) -> None:
    result = run(tmp_path, str(record_storm(tmp_path, 1, num_calls=300)), "--check")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("Everything came out as recorded.\n")


def test_options_reach_the_replay(tmp_path: Path) -> None:
    result = run(tmp_path, "--json", str(record_storm(tmp_path, 1, num_calls=300)), "--until", "3")
    assert result.returncode == 0
    assert '"stopped_before":3' in result.stdout


def test_its_help_is_the_replays_own(tmp_path: Path) -> None:
    result = run(tmp_path, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: shoal replay ")
    assert "--request ID" in result.stdout


def test_a_file_that_cannot_be_replayed_gives_a_sentence_and_status_2(tmp_path: Path) -> None:
    result = run(tmp_path, str(tmp_path / "nothing"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"shoal: {tmp_path / 'nothing'}: No such file or directory\n"


def test_without_the_scheduler_it_says_what_to_install() -> None:
    command = forwarded("replay", "services.scheduler.no_such_module.replay", "Replay.")
    result = CliRunner().invoke(command, ["file"])
    assert isinstance(result.exception, OperatorError)
    assert "pip install 'shoal[scheduler]'" in str(result.exception)
