"""From logits to the next token of each choice. Owns the meaning of `SamplingParams`, to the last bit.

A draw is a function of the row's logits, the choice's tokens with the length of its prompt, and its parameters. Nothing
is kept between draws, so a choice that comes back after preemption, or on another executor, goes on as if undisturbed;
and each row is computed by itself, so its neighbours can't change it.

Where `SamplingParams` leaves room, this is what happens:

- Logits that are not finite fail the row. Biases, penalties and log-probabilities are float64, weights float32.
- Likelier means a larger logit; among equal ones the lower id. `top_k` keeps exactly k by this order. `top_p` adds up
  probabilities in this order and keeps the shortest prefix that reaches `top_p` of what `top_k` left, at least one
  token. `min_p` compares with the likeliest token, which all of them keep.
- The draw walks the kept tokens by id and takes the first whose running sum of weights exceeds `uniform · total`.
  By id rather than by likelihood, so that two nearly equal tokens which swap ranks don't swap their outcomes.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.executor.kernels.argmax import NOT_FINITE, argmax
from services.executor.kernels.draw import pick, total_of, weigh
from services.executor.slots import Choice
from shared.messages import TokenLogprobs, int32s
from shared.sampling import SamplingParams, uniform

Floats = npt.NDArray[np.float64]
AnyFloats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]

NO_TOKEN: Final = 0
"""Stands where a failed row has no token."""
_FIRST_REACH: Final = 4.0
"""How far below the largest logit the likeliest tokens are looked for first. Sorting all of them takes far longer."""
_LAST_REACH: Final = 64.0
_FIRST_NUM_RANKED: Final = 256
"""How many of the likeliest tokens `top_p` looks at first; nearly always enough."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's outcome."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    failure: str | None = None
    """Why there is no token, in a sentence."""


class _NoTokenError(Exception):
    """This row has no token; says why."""


class Drawing:
    """Draws from a step's logits [S, vocabulary] float32, each row for the choice that it belongs to."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._likeliest: list[int] | None = None

    def draw(self, row: int, choice: Choice) -> Draw:
        """The next token of a choice from one row of logits."""
        if _takes_likeliest(choice):
            if self._likeliest is None:
                self._likeliest = argmax(self._logits).tolist()
            if (token_id := self._likeliest[row]) != NOT_FINITE:
                return Draw(token_id)
        return draw(self._logits[row].numpy(), choice)


def draw(logits: npt.NDArray[np.float32], choice: Choice) -> Draw:
    """The next token of one choice from its logits [vocabulary], with log-probabilities if it wants them."""
    sampling = choice.sampling
    try:
        if not np.isfinite(logits).all():
            raise _NoTokenError("the model's logits are not all finite numbers")
        shaped = _shaped(logits, choice)
        if not np.isfinite(shaped.max()):
            raise _NoTokenError("no token is left to draw: every one is suppressed")
        token_id = int(shaped.argmax()) if sampling.is_greedy else _drawn(shaped, choice)
    except _NoTokenError as error:
        return Draw(NO_TOKEN, failure=str(error))
    if sampling.num_logprobs is None:
        return Draw(token_id)
    return Draw(token_id, _logprobs(logits.astype(np.float64), token_id, sampling.num_logprobs))


def _takes_likeliest(choice: Choice) -> bool:
    """Whether the draw is the plain argmax of the logits and nothing else is asked for."""
    sampling = choice.sampling
    return (
        sampling.is_greedy
        and sampling.num_logprobs is None
        and not sampling.logit_bias
        and not _has_penalty(sampling)
        and not _may_not_end(choice)
    )


def _has_penalty(sampling: SamplingParams) -> bool:
    return (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) != (1.0, 0.0, 0.0)


def _may_not_end(choice: Choice) -> bool:
    return bool(choice.sampling.end_token_ids) and choice.num_output_tokens < choice.sampling.min_tokens


def _shaped(given: npt.NDArray[np.float32], choice: Choice) -> AnyFloats:
    """Logits after bias, suppression and penalties; those given, if there are none."""
    sampling = choice.sampling
    if not (sampling.logit_bias or _may_not_end(choice) or _has_penalty(sampling)):
        return given
    logits = given.astype(np.float64)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < len(logits):
            raise _NoTokenError(f"logit_bias names token {token_id}, outside the vocabulary of {len(logits)}")
        logits[token_id] += bias
    if _may_not_end(choice):
        logits[[token_id for token_id in sampling.end_token_ids if 0 <= token_id < len(logits)]] = -np.inf
    if _has_penalty(sampling):
        _penalise(logits, choice)
    return logits


def _penalise(logits: Floats, choice: Choice) -> None:
    sampling = choice.sampling
    seen = np.unique(choice.token_ids)
    said, counts = np.unique(choice.token_ids[choice.num_prompt_tokens :], return_counts=True)
    known = logits[seen]
    logits[seen] = np.where(known > 0, known / sampling.repetition_penalty, known * sampling.repetition_penalty)
    logits[said] -= sampling.frequency_penalty * counts
    logits[said] -= sampling.presence_penalty


def _drawn(logits: AnyFloats, choice: Choice) -> int:
    sampling = choice.sampling
    noise = uniform(sampling.seed, choice.index, choice.num_output_tokens)
    weights, sums = weigh(logits.astype(np.float32, copy=False), sampling.temperature)
    if (ids := _kept(logits, weights, sums, sampling)) is None:
        return pick(weights, sums, noise)
    running = weights[ids].astype(np.float64).cumsum()
    return int(ids[running.searchsorted(noise * running[-1], side="right")])


def _kept(
    logits: AnyFloats, weights: npt.NDArray[np.float32], sums: npt.NDArray[np.float32], sampling: SamplingParams
) -> Ids | None:
    """The ids that may be drawn, ascending; the likeliest is among them. None: all."""
    ids: Ids | None = None
    total = 0.0
    if 0 < sampling.top_k < len(weights):
        ids = _ranked(logits, sampling.top_k)[: sampling.top_k]
        total = float(weights[np.sort(ids)].sum(dtype=np.float64))
    elif sampling.top_p < 1:
        total = total_of(sums)
    if sampling.top_p < 1:
        ids = _top_p(logits, weights, sampling.top_p * total, ids)
    if sampling.min_p > 0:
        ids = np.flatnonzero(weights >= sampling.min_p) if ids is None else ids[weights[ids] >= sampling.min_p]
    return None if ids is None else np.sort(ids)


def _top_p(logits: AnyFloats, weights: npt.NDArray[np.float32], needed: float, ranked: Ids | None) -> Ids:
    """The likeliest tokens whose weights first reach `needed`, of `ranked` ones if they are given."""
    num_ranked = _FIRST_NUM_RANKED
    while True:
        candidates = _ranked(logits, num_ranked) if ranked is None else ranked
        running = weights[candidates].cumsum(dtype=np.float64)
        if running[-1] >= needed or ranked is not None or len(candidates) == len(weights):
            return candidates[: running.searchsorted(needed) + 1]
        num_ranked *= 8


def _ranked(logits: AnyFloats, at_least: int) -> Ids:
    """The ids of the largest logits, largest first, among equals in order: the first `at_least` of them, or more."""
    largest, reach = logits.max(), _FIRST_REACH
    candidates: Ids = np.flatnonzero(logits >= largest - reach)
    while len(candidates) < min(at_least, len(logits)):
        reach *= 2
        candidates = np.flatnonzero(logits >= largest - (reach if reach <= _LAST_REACH else np.inf))
    return candidates[np.argsort(-logits[candidates], kind="stable")]


def _logprobs(logits: Floats, token_id: int, num_alternatives: int) -> TokenLogprobs:
    """Log-probabilities under the model's own distribution."""
    largest = logits.max()
    log_total = largest + np.log(np.exp(logits - largest).sum())
    top = _ranked(logits, num_alternatives)[:num_alternatives] if num_alternatives else np.arange(0)
    return TokenLogprobs(
        logprob=float(logits[token_id] - log_total),
        top_token_ids=int32s(top.tolist()),
        top_logprobs=tuple((logits[top] - log_total).tolist()),
    )
