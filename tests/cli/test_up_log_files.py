"""Log files: bounded, moved aside at start, and understood line by line."""

import json
import logging
from pathlib import Path

import pytest

from shared.cli.mesh.log_files import LogFile, LogLine, read_line


def test_lines_are_in_the_file_at_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "executor-1.log")
    log.write(b"one")
    log.write(b"two")
    assert log.path.read_bytes() == b"one\ntwo\n"
    log.close()


def test_the_log_of_an_earlier_mesh_is_kept_beside(tmp_path: Path) -> None:
    for life in range(6):
        log = LogFile(tmp_path / "a.log")
        log.write(str(life).encode())
        log.close()
    contents = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert contents == {"a.log": "5\n", "a.log.1": "4\n", "a.log.2": "3\n", "a.log.3": "2\n"}


def test_an_empty_log_pushes_nothing_out(tmp_path: Path) -> None:
    first = LogFile(tmp_path / "a.log")
    first.write(b"worth keeping")
    first.close()
    for _ in range(5):
        LogFile(tmp_path / "a.log").close()
    assert (tmp_path / "a.log.1").read_bytes() == b"worth keeping\n"


def test_a_log_has_a_largest_size(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log", max_bytes=1000)
    for number in range(1000):
        log.write(f"line {number:04}".encode())
    log.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"a.log", "a.log.1", "a.log.2", "a.log.3"}
    assert max(sizes.values()) <= 1000 + len("line 0000\n") * 100
    assert log.path.read_text().splitlines()[-1] == "line 0999"


def test_the_tail_is_the_last_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a.log")
    for number in range(100):
        log.write(str(number).encode())
    log.write(b"\xff not UTF-8")
    log.close()
    assert len(log.tail) == 30
    assert list(log.tail)[-2:] == ["99", "\N{REPLACEMENT CHARACTER} not UTF-8"]


def test_what_the_disk_does_not_take_is_still_in_the_tail(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to("/dev/full")
    log = LogFile(tmp_path / "a.log")
    log.write(b"last words")
    log.close()
    assert list(log.tail) == ["last words"]


def test_an_event_of_a_service_is_understood() -> None:
    event = {
        "time": "now",
        "level": "warning",
        "instance": "a",
        "logger": "b",
        "event": "slow",
        "step_id": 7,
        "took_s": 1,
    }
    assert read_line(json.dumps(event)) == LogLine(logging.WARNING, "slow", "step_id=7 took_s=1")


def test_the_exception_of_an_event_comes_with_it() -> None:
    event = {"level": "critical", "event": "a bug", "exception": "Traceback\nZeroDivisionError"}
    assert read_line(json.dumps(event)) == LogLine(logging.CRITICAL, "a bug\nTraceback\nZeroDivisionError")


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("[25] 2025/11/30 10:42:00.123456 [INF] Server is ready", logging.INFO, "Server is ready"),
        ("[25] 2025/11/30 10:42:00.123456 [WRN] low disk", logging.WARNING, "low disk"),
        ("[25] 2025/11/30 10:42:00.123456 [ERR] cannot", logging.ERROR, "cannot"),
        ("[25] 2025/11/30 10:42:00.123456 [FTL] Error listening", logging.CRITICAL, "Error listening"),
    ],
)
def test_a_line_of_nats_is_understood(line: str, level: int, text: str) -> None:
    assert read_line(line) == LogLine(level, text)


@pytest.mark.parametrize(
    "line", ["", "Traceback", "{}", "[1]", "3", "null", '{"level": "odd", "event": "x"}', '{"level": 3}']
)
def test_anything_else_is_text(line: str) -> None:
    assert read_line(line) == LogLine(None, line)
