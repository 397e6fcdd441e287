"""`python -m services.executor.bench`: where the time of a step goes, beside what the machine could do at best.

Exit status: 0, or 2 for what whoever started it must mend.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from services.executor.bench.benchmark import Order, run
from services.executor.bench.report import as_json, as_lines
from services.executor.config import ExecutorConfig
from shared import config as settings
from shared.config import MeshConfig
from shared.errors import OperatorError
from shared.models.store import ModelStore

EXIT_OPERATOR: Final = 2
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS: Final = (300, 2000)
CHUNKS: Final = (64, 256, 512)
REPEAT: Final = 15


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Measure and print what the command line asks for; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        benchmark = run(_order(options, environ), say=lambda sentence: print(sentence, file=sys.stderr))
    except OperatorError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_OPERATOR
    print(json.dumps(as_json(benchmark)) if options.json else "\n".join(as_lines(benchmark)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shoal bench executor",
        description="Measure where the time of an executor's step goes, sampling included. SHOAL_EXECUTOR_* settings "
        "hold here too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def add_numbers(name: str, default: tuple[int, ...], least: int, what: str) -> None:
        parser.add_argument(name, type=_at_least(least), nargs="+", default=default, metavar="N", help=what)

    add_numbers("--rows", ROWS, 1, "sequences of which a decode step computes a token each")
    add_numbers("--contexts", CONTEXTS, 1, "tokens that these sequences have")
    add_numbers("--chunks", CHUNKS, 2, "tokens of a prompt that a prefill step computes")
    parser.add_argument(
        "--repeat", type=_at_least(1), default=REPEAT, metavar="N", help="steps of each kind to measure"
    )
    for name, metavar, what in (
        ("--model", "NAME", "a model in the store, instead of SHOAL_MODEL"),
        ("--dtype", "FORMAT", "instead of SHOAL_EXECUTOR_DTYPE"),
        ("--threads", "N", "instead of SHOAL_EXECUTOR_THREADS"),
    ):
        parser.add_argument(name, metavar=metavar, help=what, default=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="a JSON object instead of a table")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    """Reads whole numbers that are large enough."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return read


def _order(options: argparse.Namespace, environ: Mapping[str, str]) -> Order:
    """What to measure. Raises ConfigError for a setting that is wrong, ModelError if the model is not there."""
    named = {settings.variable(ExecutorConfig, name): vars(options).get(name) for name in ("dtype", "threads")}
    named[settings.variable(MeshConfig, "model")] = vars(options).get("model")
    environ = {**environ, **{name: value for name, value in named.items() if value is not None}}
    mesh = settings.load(MeshConfig, environ)
    return Order(
        model=mesh.model,
        folder=ModelStore(mesh.home).folder(mesh.model),
        config=settings.load(ExecutorConfig, environ),
        rows=options.rows,
        contexts=options.contexts,
        chunks=options.chunks,
        repeat=options.repeat,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends like any other program
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
