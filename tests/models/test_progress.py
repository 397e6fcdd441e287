"""What a pull prints."""

import io

import pytest

from shared.clock import FakeClock
from shared.models.progress import Bars, Lines, Silent, choose_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It does."""
        return True


def test_the_stream_decides_how_progress_looks() -> None:
    assert isinstance(choose_progress(Terminal(), quiet=True), Silent)
    assert isinstance(choose_progress(Terminal(), quiet=False), Bars)
    assert isinstance(choose_progress(io.StringIO(), quiet=False), Lines)


def test_lines_report_start_and_end_and_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), FakeClock()
    with Lines(stream, clock.now).transfer("x.gguf", 2_000_000) as meter:
        for megabytes, seconds in ((0.1, 5), (0.5, 5), (0.6, 1), (1.5, 12)):
            clock.advance(seconds)
            meter(int(megabytes * 1e6))
    assert stream.getvalue().splitlines() == [
        "fetching x.gguf (2 MB)",
        "  x.gguf: 500 kB of 2 MB",
        "  x.gguf: 1.5 MB of 2 MB",
        "fetched x.gguf in 23 s",
    ]


def test_small_files_are_not_worth_a_line() -> None:
    stream = io.StringIO()
    with Lines(stream).transfer("config.json", 999_999) as meter:
        meter(999_999)
    assert stream.getvalue() == ""


def test_bars_leave_one_line_for_each_file_and_none_for_a_failure() -> None:
    stream = Terminal()
    bars = Bars(stream)
    with bars.transfer("[a].gguf", 100) as first, bars.transfer("b", 100) as second:
        first(100)
        second(50)
    with pytest.raises(ZeroDivisionError), bars.transfer("c", 100):
        raise ZeroDivisionError
    output = stream.getvalue()
    assert "fetched [a].gguf (100 B)" in output
    assert "fetched c" not in output
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h")  # the cursor is back


def test_silence_is_silent() -> None:
    silent = Silent()
    silent.say("x")
    with silent.transfer("x", 1) as meter:
        meter(1)
