"""`shoal evaluate`: what a number format costs in quality, on texts of the user's own.

Owns the command and its table. The executor's code computes, in a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import click
import msgspec

from shared import config as settings
from shared.cli.evaluated_texts import STDIN, TextReader
from shared.cli.forwarded import check_is_installed
from shared.config import MeshConfig
from shared.errors import OperatorError
from shared.evaluation import Evaluation, EvaluationOrder, FormatScore, TextScore
from shared.models.config import load_config
from shared.models.store import ModelStore

_MODULE: Final = "services.executor.evaluate"
_DEFAULT_CONTEXT: Final = 1024
_HEADINGS: Final = ("text", "tokens", "format", "NLL", "perplexity", "difference", "", "KL", "top-1")
_NUMERIC: Final = (1, 3, 4, 5, 7, 8)
_LEGEND: Final = """\
NLL: mean negative log-likelihood of a token, in nats (perplexity is e to the NLL). difference: from float32, with its
standard error. KL: mean divergence of the next token's distribution from float32's, in nats. top-1: how often the most
likely token is the same."""


@click.command(short_help="Compare number formats by what they cost in quality.")
@click.argument("model")
@click.option(
    "--dtype", "dtypes", multiple=True, metavar="FORMAT", help="A number format, such as int8; may be given repeatedly."
)
@click.option("--kv-dtype", metavar="FORMAT", help="Number format of the KV cache beside all of them.")
@click.option(
    "--text", "paths", multiple=True, metavar="FILE", help="A text (- for standard input); may be given repeatedly."
)
@click.option("--context", type=click.IntRange(min=2), metavar="N", help="Cut texts into windows of N tokens.")
@click.option("--max-tokens", type=click.IntRange(min=2), metavar="N", help="Take the first N tokens of each text.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    dtypes: tuple[str, ...],
    kv_dtype: str | None,
    paths: tuple[str, ...],
    *,
    context: int | None,
    max_tokens: int | None,
    as_json: bool,
) -> None:
    """Compare what MODEL makes of texts in float32 and in other number formats.

    Without --dtype the format is the one that an executor would choose here (SHOAL_EXECUTOR_DTYPE). Texts are compared
    in windows of 1024 tokens, or of the model's context if that is shorter.
    """
    if not paths:
        raise click.UsageError("name a text to compare on, with --text FILE (or --text - for standard input)")
    if paths.count(STDIN) > 1:
        raise click.UsageError("standard input is one text; name it once")
    check_is_installed(_MODULE)
    folder = ModelStore(settings.load(MeshConfig, os.environ).home).folder(model)
    reader = TextReader(folder)
    order = EvaluationOrder(
        model=model,
        folder=str(folder),
        dtypes=tuple(dict.fromkeys(dtypes)),
        kv_dtype=kv_dtype,
        context=_choose_context(context, load_config(folder).max_model_len),
        bos_token_id=reader.bos_token_id,
        texts=tuple(reader.read(path, max_tokens=max_tokens) for path in paths),
    )
    evaluation = _evaluate(order)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(evaluation), indent=2))
    else:
        for line in report(evaluation):
            click.echo(line)


def report(evaluation: Evaluation) -> list[str]:
    """The comparison as lines for people."""
    texts = list(evaluation.texts)
    if len(texts) > 1:
        texts.append(evaluation.total)
    rows = [row for text in texts for row in _rows(text)]
    title = f"{evaluation.model}, windows of {evaluation.context} tokens"
    return [title, "", *_aligned([_HEADINGS, *rows]), "", *_LEGEND.splitlines()]


def _evaluate(order: EvaluationOrder) -> Evaluation:
    """Have it carried out. The other process reports to standard error; if it fails, this one ends as it does."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE], input=msgspec.json.encode(order), stdout=subprocess.PIPE, check=False
        )
    except KeyboardInterrupt:  # the other process has heard of it too
        sys.exit(130)
    if done.returncode:
        sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    return msgspec.json.decode(done.stdout, type=Evaluation)


def _choose_context(asked: int | None, most: int) -> int:
    if asked is None:
        return min(_DEFAULT_CONTEXT, most)
    if asked > most:
        raise OperatorError(f"--context {asked} is more than this model has room for: {most} tokens")
    return asked


def _rows(text: TextScore) -> list[tuple[str, ...]]:
    first = (text.text, str(text.num_tokens), "float32", f"{text.nll:.4f}", f"{text.perplexity:.2f}", "", "", "", "")
    return [first, *(_row(each) for each in text.formats)]


def _row(score: FormatScore) -> tuple[str, ...]:
    formats = f"{score.weights}, KV {score.kv_cache}"
    return (
        "",
        "",
        formats if score.dtype == score.weights else f"{score.dtype}: {formats}",
        f"{score.nll:.4f}",
        f"{score.perplexity:.2f}",
        f"{score.delta_nll:+.4f}",
        f"± {score.delta_nll_error:.4f}",
        f"{score.mean_kl:.5f}",
        f"{score.top1_agreement:.2%}",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_pad(*cell) for cell in zip(range(len(row)), row, widths, strict=True)).rstrip() for row in rows]


def _pad(column: int, text: str, width: int) -> str:
    return text.rjust(width) if column in _NUMERIC else text.ljust(width)
