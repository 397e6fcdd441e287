"""Two formats of one model on the same text, position by position.

Owns windows and measures. Does not own texts, nor how a model is loaded.

A text is cut into windows of at most `context` tokens; each is read from its own beginning. Where the model begins its
prompts with a BOS token, every window begins with it; elsewhere a window begins with the token before the first that it
predicts. So every token of a text is predicted exactly once, but for the first of all where there is no BOS token.

Let P be the distribution of the next token under float32, Q under another format, both after the same tokens cᵢ of the
window, and tᵢ the token that comes. Means are over all n positions; logarithms are natural, in float64:

    nll              mean of −ln Q(tᵢ | cᵢ), in nats per token; for float32 itself of −ln P(tᵢ | cᵢ)
    perplexity       exp(nll)
    delta_nll        mean of dᵢ = ln P(tᵢ | cᵢ) − ln Q(tᵢ | cᵢ): above 0 if the format predicts the text less well
    delta_nll_error  its standard error, the standard deviation of the dᵢ over √n (as if positions were independent)
    mean_kl          mean of KL(P ‖ Q) = Σᵥ P(v | cᵢ) · (ln P(v | cᵢ) − ln Q(v | cᵢ)), in nats
    top1_agreement   the share of positions at which P and Q have the same most likely token (of equals, the first)

A row's numbers do not depend on the rows beside it, so what is measured in chunks here holds for any batch.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from services.executor.batch import ForwardBatch
from services.executor.factory import LoadedModel
from shared.errors import ModelError
from shared.evaluation import FormatScore, TextScore

CHUNK: Final = 64
"""Tokens that are computed at once, each with its logits: 64 rows of 150,000 float64 numbers take 77 MB."""
_MAX_EXPONENT: Final = 709.0
"""Of exp in float64. JSON has no infinity."""


class Format(NamedTuple):
    """A model in one format, and how the format is called."""

    dtype: str
    weights: str
    kv_cache: str
    loaded: LoadedModel


class Window(NamedTuple):
    """What is predicted, and the token before."""

    first: int
    targets: Sequence[int]


class Positions(NamedTuple):
    """What was found at each of n positions under one format, beside float32: float64 [n] each."""

    nll: Tensor
    delta_nll: Tensor
    kl: Tensor
    agrees: Tensor
    """1 or 0."""


def windows(token_ids: Sequence[int], *, context: int, bos_token_id: int | None) -> list[Window]:
    """The windows of a text. None if it has no token that could be predicted."""
    start = 1 if bos_token_id is None else 0
    return [
        Window(token_ids[first - 1] if bos_token_id is None else bos_token_id, token_ids[first : first + context])
        for first in range(start, len(token_ids), context)
    ]


def compare(
    reference: LoadedModel, formats: Sequence[Format], text: Sequence[Window], on_progress: Callable[[int], None]
) -> list[Positions]:
    """The text under each format beside the reference. `on_progress` is told of every few positions that are done.

    Raises ModelError if a model's logits are not numbers.
    """
    pieces: list[list[Positions]] = [[] for _ in formats]
    for window in text:
        for start, token_ids, targets in _chunks(window):
            expected = _log_probs("float32", reference, token_ids, start)
            for found, each in zip(pieces, formats, strict=True):
                given = _log_probs(each.dtype, each.loaded, token_ids, start)
                found.append(_measure(expected, given, targets))
            on_progress(len(targets))
    return [_joined(found) for found in pieces]


def sum_up(name: str, formats: Sequence[Format], found: Sequence[Positions]) -> TextScore:
    """The figures of a text from its positions under each format, of which there is one at least."""
    reference_nll = float((found[0].nll - found[0].delta_nll).mean())
    return TextScore(
        text=name,
        num_tokens=len(found[0].nll),
        nll=reference_nll,
        perplexity=_perplexity(reference_nll),
        formats=tuple(_score(each, positions) for each, positions in zip(formats, found, strict=True)),
    )


def sum_up_all(formats: Sequence[Format], texts: Sequence[Sequence[Positions]]) -> TextScore:
    """The figures over all positions of all texts: long texts count for more."""
    return sum_up("all texts", formats, [_joined(found) for found in zip(*texts, strict=True)])


def _chunks(window: Window) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First position, inputs and targets of each chunk."""
    targets = torch.tensor(window.targets)
    token_ids = torch.cat((torch.tensor([window.first]), targets[:-1]))
    for start in range(0, len(targets), CHUNK):
        yield start, token_ids[start : start + CHUNK], targets[start : start + CHUNK]


def _log_probs(name: str, loaded: LoadedModel, token_ids: Tensor, start: int) -> Tensor:
    """ln of the distribution after each token, [n, vocabulary] float64. What is before `start` is in the cache."""
    batch = _batch(token_ids, start, loaded.capacity.block_size)
    with torch.inference_mode():
        found = torch.log_softmax(loaded.model(batch, loaded.kv_cache).double(), dim=-1)
    if not bool(torch.isfinite(found).all()):
        raise ModelError(f"the logits of {loaded.capacity.model} in {name} are not numbers")
    return found


def _batch(token_ids: Tensor, start: int, block_size: int) -> ForwardBatch:
    """One row that goes on at `start`, in blocks 0, 1, 2, …: a token's slot is its position."""
    end = start + len(token_ids)
    positions = torch.arange(start, end)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=positions,
        query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
        block_tables=torch.arange(-(-end // block_size), dtype=torch.int32)[None],
        logits_rows=torch.arange(len(token_ids)),
    )


def _measure(expected: Tensor, given: Tensor, targets: Tensor) -> Positions:
    likelihoods = [log_probs.gather(1, targets[:, None])[:, 0] for log_probs in (expected, given)]
    return Positions(
        nll=-likelihoods[1],
        delta_nll=likelihoods[0] - likelihoods[1],
        kl=(expected.exp() * (expected - given)).sum(-1),
        agrees=(expected.argmax(-1) == given.argmax(-1)).double(),
    )


def _joined(pieces: Sequence[Positions]) -> Positions:
    return Positions(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _score(each: Format, found: Positions) -> FormatScore:
    nll, num_positions = float(found.nll.mean()), len(found.nll)
    error = float(found.delta_nll.std()) / math.sqrt(num_positions) if num_positions > 1 else 0.0
    return FormatScore(
        dtype=each.dtype,
        weights=each.weights,
        kv_cache=each.kv_cache,
        nll=nll,
        perplexity=_perplexity(nll),
        delta_nll=float(found.delta_nll.mean()),
        delta_nll_error=error,
        mean_kl=float(found.kl.mean()),
        top1_agreement=float(found.agrees.mean()),
    )


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, _MAX_EXPONENT))
