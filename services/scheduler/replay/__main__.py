"""`python -m services.scheduler.replay FILE`: make a recording's decisions again and say whether they are the same.

Exit status: 0 if everything came out as recorded, 1 if not, 2 if the file cannot be replayed.
"""

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.scheduler.recording.recording import software_version
from services.scheduler.replay.player import Observer, Player
from services.scheduler.replay.queues import look_at
from services.scheduler.replay.reading import RecordingReader
from services.scheduler.replay.report import Report, as_json, as_text
from services.scheduler.replay.summary import Counting
from services.scheduler.replay.timeline import Timeline
from shared.errors import OperatorError
from shared.ids import RequestId

EXIT_DIFFERENT: Final = 1
EXIT_UNREADABLE: Final = 2


def main(arguments: Sequence[str]) -> int:
    """Replay and print; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        report = replay(options)
    except OperatorError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    if options.json:
        print(as_json(report))
    else:
        for line in as_text(report):
            print(line)
    return 0 if report.is_same else EXIT_DIFFERENT


def replay(options: Namespace) -> Report:
    """Play a file as the options say. Raises UnreadableRecording if that is not possible."""
    counting = Counting()
    timeline = None if options.request is None else Timeline(RequestId(options.request))
    observers: list[Observer] = [counting] if timeline is None else [counting, timeline]
    with RecordingReader(options.file) as reader:
        player = Player(reader.header, observers, checks_invariants=options.check)
        problem = player.play(reader.records(), until=options.until)
        is_at_end = problem is None and player.num_played + 1 != options.until
        report = Report(
            reader.header,
            software_version(),
            counting.summary,
            reader.ending if is_at_end else None,
            problem,
            player.crashes,
            options.request,
            [] if timeline is None else timeline.entries,
        )
    if options.until is not None and problem is None:
        report.stopped_before = player.num_played + 1
        report.queues = look_at(player.fleet, player.open_requests)
    return report


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="shoal replay",
        description="Make the decisions of a scheduler's recording again, and compare each with what was recorded.",
        epilog="Exit status: 0 if everything came out as recorded, 1 if not, 2 if the file cannot be replayed.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a file that a scheduler recorded")
    parser.add_argument("--request", metavar="ID", help="print what happened to this request")
    parser.add_argument(
        "--until", type=_record_number, metavar="N", help="stop before record N and print the queues at that point"
    )
    parser.add_argument("--check", action="store_true", help="check the core's invariants after every record")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _record_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError("records are numbered 1, 2, 3, …")
    return int(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends like any other program
    sys.exit(main(sys.argv[1:]))
