"""Logs: one event a line, whatever is in it."""

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from shared import log as logs
from shared.log import without_passwords


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _configure(style: str, *, level: str = "info", stream: io.StringIO | None = None) -> io.StringIO:
    stream = stream or io.StringIO()
    logs.configure(name="executor-1", level=level, style=style, stream=stream)
    return stream


log = logging.getLogger("services.executor.service")


def test_json_is_one_line_with_instance_level_event_and_the_extras() -> None:
    stream = _configure("json")
    log.warning("a step was slow", extra={"step_id": 7, "took_s": 1.5, "ids": [1, 2]})
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "warning",
        "instance": "executor-1",
        "logger": "services.executor.service",
        "event": "a step was slow",
        "step_id": 7,
        "took_s": 1.5,
        "ids": [1, 2],
    }


def test_json_stays_one_line_with_newlines_exceptions_and_foreign_types() -> None:
    stream = _configure("json")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        log.exception("it\nbroke", extra={"what": object, "text": "é\n\u2028"})
    assert stream.getvalue().count("\n") == 1
    event = json.loads(stream.getvalue())
    assert event["event"] == "it\nbroke"
    assert event["text"] == "é\n\u2028"
    assert "ValueError: first\nsecond" in event["exception"]
    assert "object" in event["what"]


def test_json_times_are_utc_to_the_millisecond() -> None:
    stream = _configure("json")
    record = logging.makeLogRecord({"name": "x", "msg": "now", "levelno": logging.INFO, "levelname": "INFO"})
    record.created, record.msecs = 1_700_000_000.25, 250.0
    logging.getLogger().handle(record)
    assert json.loads(stream.getvalue())["time"] == "2023-11-14T22:13:20.250Z"


def test_pretty_is_aligned_text_with_the_extras_behind() -> None:
    stream = _configure("pretty")
    log.info("started", extra={"model": "tiny", "num_blocks": 4})
    assert stream.getvalue()[8:] == " executor-1      started  model=tiny num_blocks=4\n"


def test_pretty_shows_exceptions() -> None:
    stream = _configure("pretty")
    try:
        raise ValueError("no")
    except ValueError:
        log.critical("a bug ends this process", exc_info=True)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("a bug ends this process")
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "ValueError: no"


def test_only_a_terminal_gets_colours() -> None:
    terminal, pipe = _configure("pretty", stream=_Terminal()), io.StringIO()
    log.error("red")
    assert "\x1b[31m" in terminal.getvalue()
    _configure("pretty", stream=pipe)
    log.error("plain")
    assert "\x1b" not in pipe.getvalue()


def test_auto_is_pretty_on_a_terminal_and_json_elsewhere() -> None:
    terminal = _configure("auto", stream=_Terminal())
    log.info("hello")
    assert "executor-1" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    pipe = _configure("auto")
    log.info("hello")
    assert json.loads(pipe.getvalue())["event"] == "hello"


def test_less_severe_events_are_left_out() -> None:
    stream = _configure("json", level="warning")
    log.info("unimportant")
    log.warning("important")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["important"]


def test_configuring_again_replaces_the_first_stream() -> None:
    first, second = _configure("json"), _configure("json")
    log.info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_half_a_surrogate_pair_reaches_standard_error_without_trouble(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=sys.__stderr__.errors if sys.__stderr__ else None)
    logs.configure(name="x", level="info", style="json", stream=stream)
    log.info("odd", extra={"text": "\ud800"})
    stream.seek(0)
    assert json.loads(stream.read())["text"] == "\ud800"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"),
        ("nats://(hidden)@a:1,nats://(hidden)@b:2", "nats://me:secret@a:1,nats://token@b:2"),
        ("someone@example", "someone@example"),
    ],
)
def test_passwords_in_addresses_are_hidden(text: str, shown: str) -> None:
    assert without_passwords(text) == shown
