"""`python -m services.executor.evaluate`: an `EvaluationOrder` on standard input, its `Evaluation` on standard output.

Both are JSON; progress and complaints go to standard error. Exit status: 0, or 2 if the order cannot be carried out.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, TextIO

import msgspec

from services.executor.config import ExecutorConfig
from services.executor.evaluate.scoring import CHUNK, Format, compare, sum_up, sum_up_all, windows
from services.executor.factory import load_model
from services.executor.formats import Formats, choose_formats
from services.executor.kernels.vectors import dot_instruction
from services.executor.kv_cache import block_bytes
from shared import config as settings
from shared.errors import OperatorError
from shared.evaluation import Evaluation, EvaluationOrder
from shared.models.config import load_config

EXIT_OPERATOR: Final = 2
_TERMINAL_INTERVAL_S: Final = 0.5
_LINE_INTERVAL_S: Final = 10.0


class Progress(Protocol):
    """Where an evaluation reports to."""

    def say(self, sentence: str) -> None:
        """Tell what happens."""
        ...

    def advance(self, num_positions: int) -> None:
        """So many more are done."""
        ...


class Lines:
    """A line for each thing that happens, and one now and then that says how far it is."""

    def __init__(self, stream: TextIO, num_positions: int) -> None:
        self._stream = stream
        self._total = num_positions
        self._done = 0
        self._interval_s = _TERMINAL_INTERVAL_S if stream.isatty() else _LINE_INTERVAL_S
        self._said_at = time.monotonic()

    def say(self, sentence: str) -> None:
        """Print the sentence."""
        print(sentence, file=self._stream, flush=True)

    def advance(self, num_positions: int) -> None:
        """Print how far it is if that is due; on a terminal, in one line that is written over."""
        self._done += num_positions
        is_end = self._done == self._total
        if time.monotonic() - self._said_at >= self._interval_s or (is_end and self._stream.isatty()):
            start, end = ("\r", "\n" if is_end else "") if self._stream.isatty() else ("", "\n")
            print(f"{start}{self._done} of {self._total} tokens", end=end, file=self._stream, flush=True)
            self._said_at = time.monotonic()


def main() -> int:
    """Carry out the order on standard input; the exit status."""
    try:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=EvaluationOrder)
    except msgspec.DecodeError as error:
        print(f"shoal: this takes what `shoal evaluate` writes to it: {error}", file=sys.stderr)
        return EXIT_OPERATOR
    cut = [windows(text.token_ids, context=order.context, bos_token_id=order.bos_token_id) for text in order.texts]
    progress = Lines(sys.stderr, sum(len(window.targets) for text in cut for window in text))
    try:
        evaluation = evaluate(order, os.environ, progress)
    except OperatorError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_OPERATOR
    sys.stdout.buffer.write(msgspec.json.encode(evaluation))
    return 0


def evaluate(order: EvaluationOrder, environ: Mapping[str, str], progress: Progress) -> Evaluation:
    """The comparison that `order` asks for, with the executor's settings in `environ` for all that it does not name.

    The model is in memory in float32 and in every format at once. Raises OperatorError if a format or a model cannot be
    had.
    """
    configs = [_config(order, environ, dtype) for dtype in order.dtypes or (None,)]
    configs.insert(0, replace(configs[0], dtype="float32", kv_dtype="float32"))
    choices = [choose_formats(config, load_config(Path(order.folder)), dot_instruction()) for config in configs]
    reference, *formats = [_load(order, *each, progress) for each in zip(configs, choices, strict=True)]
    found = []
    for text in order.texts:
        cut = windows(text.token_ids, context=order.context, bos_token_id=order.bos_token_id)
        found.append(compare(reference.loaded, formats, cut, progress.advance))
    return Evaluation(
        model=order.model,
        context=order.context,
        texts=tuple(sum_up(text.name, formats, each) for text, each in zip(order.texts, found, strict=True)),
        total=sum_up_all(formats, found),
    )


def _config(order: EvaluationOrder, environ: Mapping[str, str], dtype: str | None) -> ExecutorConfig:
    """The settings of an executor that computes in `dtype`. Raises ConfigError if there is no such format."""
    asked = {"dtype": dtype, "kv_dtype": order.kv_dtype}
    named = {settings.variable(ExecutorConfig, name): value for name, value in asked.items() if value is not None}
    return settings.load(ExecutorConfig, {**environ, **named})


def _load(order: EvaluationOrder, config: ExecutorConfig, chosen: Formats, progress: Progress) -> Format:
    """The model in this format, with room for one window."""
    folder = Path(order.folder)
    progress.say(f"loading {order.model}: weights {chosen.weights}, KV cache {chosen.cache}")
    num_bytes = -(-order.context // config.block_size) * block_bytes(
        load_config(folder), config.block_size, chosen.cache
    )
    fitting = replace(
        config,
        keep_packed=False,
        kv_cache_mb=-(-num_bytes // (1 << 20)),
        max_slots=CHUNK,
        max_step_tokens=CHUNK,
        max_model_len=order.context,
    )
    return Format(config.dtype, chosen.weights, chosen.cache, load_model(folder, order.model, fitting))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
