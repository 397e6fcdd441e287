"""`shoal simulate` and `shoal bench scheduler`, as people and programs call them."""

import json
import signal
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from services.scheduler import bench
from services.scheduler.simulate.__main__ import main
from shared.cli import bench as bench_group
from shared.cli.forwarded import forwarded
from shared.errors import OperatorError

_KEYS = {"throughput_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "jain", "hit_rate", "preemptions", "wall_s"}
_SMALL = ["--requests", "40", "--executors", "2"]


def _shoal(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shared.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_json_is_one_object_with_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    main([*_SMALL, "--policy", "fcfs", "--json"])
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == _KEYS
    assert figures["throughput_tok_s"] > 0


def test_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for seed in ("4", "4", "5"):
        main([*_SMALL, "--seed", seed, "--json"])
        printed.append(json.loads(capsys.readouterr().out))
        del printed[-1]["wall_s"]
    assert printed[0] == printed[1] != printed[2]


def test_all_policies_are_a_list_in_json_and_a_row_each_in_text(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["shoal", "fcfs", "no-cache", "random-placement"]
    main([*_SMALL, "--policy", "all", "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert [figures.pop("policy") for figures in listed] == names
    assert all(set(figures) == _KEYS for figures in listed)
    main([*_SMALL, "--policy", "all"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[4:8]] == names


@pytest.mark.parametrize(
    "arguments", [["--requests", "0"], ["--executors", "x"], ["--load", "nan"], ["--policy", "lru"]]
)
def test_an_argument_that_makes_no_sense_is_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_shoal_command_simulates() -> None:
    done = _shoal("simulate", *_SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == _KEYS


def test_the_shoal_command_passes_on_how_it_failed() -> None:
    done = _shoal("simulate", "--requests", "-1")
    assert done.returncode == 2
    assert "--requests" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_benchmark_prints_milliseconds_by_number_of_requests() -> None:
    done = _shoal("bench", "scheduler", "--json", "--steps", "8", "--running", "4", "16")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert list(measured) == ["4", "16"]
    assert all(0 < milliseconds < 1000 for milliseconds in measured.values())


@pytest.mark.parametrize(
    "arguments", [["simulate", *_SMALL], ["bench", "scheduler", "--steps", "4", "--running", "4"]], ids=lambda a: a[0]
)
def test_a_reader_that_has_seen_enough_ends_it_without_a_word(arguments: list[str]) -> None:
    """As with `shoal simulate | head -1`."""
    command = [sys.executable, "-m", "shared.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_the_benchmark_measures_steps_that_give_every_request_a_token() -> None:
    steady = bench.SteadyDecode(8)
    for _ in range(30):
        assert steady.step() > 0
        assert steady._is_steady(8)


def test_a_service_that_is_not_installed_is_a_plain_sentence() -> None:
    result = CliRunner().invoke(forwarded("simulate", "services.absent.simulate", "Simulate."), [])
    assert isinstance(result.exception, OperatorError)
    assert "pip install 'shoal[absent]'" in str(result.exception)


def test_bench_without_a_subcommand_measures_the_scheduler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def note(command: list[str], *, check: bool) -> "subprocess.CompletedProcess[str]":
        measured.append(command[2])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench_group, "mesh_command", click.Command("mesh", callback=lambda: measured.append("mesh")))
    monkeypatch.setattr(subprocess, "run", note)
    result = CliRunner().invoke(bench_group.command, [])
    assert result.exit_code == 0, result.output
    assert measured == ["mesh", "services.scheduler.bench", "services.executor.bench"]
