"""Logs: one event a line, whatever is in it."""

import ast
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import log as logs
from shared.log import about, without_passwords
from shared.messages import TraceContext


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hooks = threading.excepthook, sys.excepthook, sys.unraisablehook
    yield
    threading.excepthook, sys.excepthook, sys.unraisablehook = hooks
    logging.captureWarnings(False)
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
    log.info("started", extra={"model": "tiny", "code": None, "num_blocks": 4})
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


def test_events_about_a_request_have_its_id_and_that_of_its_trace_if_it_has_one() -> None:
    stream = _configure("json")
    trace = TraceContext(bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736"), b"\1" * 8)
    log.info("request ended", extra=about("req-1"))
    log.info("request ended", extra=about("req-2", trace) | {"model": "tiny"})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["request_id"] == "req-1"
    assert "trace_id" not in first
    assert (second["request_id"], second["trace_id"], second["model"]) == (
        "req-2",
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "tiny",
    )


@pytest.mark.parametrize("name", ["nats", "aiohttp.server", "asyncio", "opentelemetry.sdk", "some.library"])
def test_what_libraries_log_has_the_same_form(name: str) -> None:
    stream = _configure("json")
    try:
        raise OSError("gone\naway")
    except OSError:
        logging.getLogger(name).error("Error handling request from %s", "127.0.0.1", exc_info=True)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["logger"], event["event"]) == (name, "Error handling request from 127.0.0.1")
    assert event["exception"].endswith("OSError: gone\naway")


def test_warnings_are_events() -> None:
    stream = _configure("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("this will go away", UserWarning, stacklevel=1)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event["logger"] == "py.warnings"
    assert "this will go away" in event["event"]


def test_what_nobody_catches_is_an_event() -> None:
    stream = _configure("json")
    logs.log_what_nobody_catches()

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    try:
        fail()
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2, "who presses Ctrl-C knows"
    for line in lines:
        event = json.loads(line)
        assert (event["level"], event["event"]) == ("critical", "an exception that nobody caught")
        assert event["exception"].endswith("ZeroDivisionError: a bug")


def _log_calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of a logger in services and what they share, with where it is."""
    root = Path(__file__).parents[2]
    for folder in ("services", "shared"):
        for path in sorted((root / folder).rglob("*.py")):
            if "cli" in path.parts:
                continue  # commands talk to people
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
                    yield f"{path.relative_to(root)}:{node.lineno}", node


def test_every_event_is_a_fixed_sentence_with_the_rest_as_fields() -> None:
    calls = list(_log_calls())
    assert len(calls) > 50
    reserved = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
    for place, call in calls:
        assert isinstance(call.func, ast.Attribute)
        sentences = call.args[1:] if call.func.attr == "log" else call.args
        assert len(sentences) == 1, place
        assert isinstance(sentences[0], ast.Constant), place
        assert isinstance(sentences[0].value, str), place
        assert "%" not in sentences[0].value, place
        assert {keyword.arg for keyword in call.keywords} <= {"extra", "exc_info"}, place
        for node in ast.walk(call):
            if isinstance(node, ast.Dict):
                keys = {key.value for key in node.keys if isinstance(key, ast.Constant)}
                assert not keys & reserved, place
                assert "prompt" not in keys or place.startswith("services/gateway/accounts.py"), place
