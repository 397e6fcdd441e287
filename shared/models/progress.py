"""How far a pull has come, for people: bars on a terminal, plain lines elsewhere, or nothing."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from shared.models.units import show_bytes

Meter = Callable[[int], None]
"""Called with the number of bytes that have arrived so far; it may go back when a transfer starts again."""

_LINE_INTERVAL_S = 10.0
_SMALL_BYTES = 1_000_000
"""A transfer of less is not worth a line."""


class Progress(Protocol):
    """Where a pull reports to."""

    def say(self, sentence: str) -> None:
        """Tell what happens."""
        ...

    def transfer(self, label: str, total_bytes: int) -> contextlib.AbstractContextManager[Meter]:
        """Show one transfer for as long as the context lasts."""
        ...


class Silent:
    """Reports nothing."""

    def say(self, sentence: str) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Meter]:
        """Nothing."""
        yield lambda _num_bytes: None


class Lines:
    """A line at the start and the end of each transfer that takes long, and one every ten seconds between."""

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now

    def say(self, sentence: str) -> None:
        """Print the sentence."""
        print(sentence, file=self._stream, flush=True)

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Meter]:
        """Print how far it is now and then."""
        if total_bytes < _SMALL_BYTES:
            yield lambda _num_bytes: None
            return
        self.say(f"fetching {label} ({show_bytes(total_bytes)})")
        began = last = self._now()

        def reached(num_bytes: int) -> None:
            nonlocal last
            if self._now() - last >= _LINE_INTERVAL_S:
                last = self._now()
                self.say(f"  {label}: {show_bytes(num_bytes)} of {show_bytes(total_bytes)}")

        yield reached
        self.say(f"fetched {label} in {self._now() - began:.0f} s")


class Bars:
    """A bar for each transfer that runs, below the sentences."""

    def __init__(self, stream: TextIO) -> None:
        from rich import progress
        from rich.console import Console

        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(file=stream),
            transient=True,
        )
        self._num_running = 0

    def say(self, sentence: str) -> None:
        """Print the sentence above the bars."""
        self._bars.console.print(sentence, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def transfer(self, label: str, total_bytes: int) -> Iterator[Meter]:
        """Show a bar; the display is live only while there is one, so that nothing is left behind on an error."""
        from rich.markup import escape

        if self._num_running == 0:
            self._bars.start()
        self._num_running += 1
        bar = self._bars.add_task(escape(label), total=total_bytes)
        try:
            yield lambda num_bytes: self._bars.update(bar, completed=num_bytes)
            self.say(f"fetched {label} ({show_bytes(total_bytes)})")
        finally:
            self._bars.remove_task(bar)
            self._num_running -= 1
            if self._num_running == 0:
                self._bars.stop()


def choose_progress(stream: TextIO, *, quiet: bool) -> Progress:
    """What suits the stream: nothing if `quiet`, bars on a terminal, lines elsewhere."""
    if quiet:
        return Silent()
    return Bars(stream) if stream.isatty() else Lines(stream)
