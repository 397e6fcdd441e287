"""Sampling written a second time, slowly: plain Python floats, one token after the other, no arrays.

What `SamplingParams` and the sampler's docstring promise, with nothing in common with the sampler's code.
"""

import math
from collections import Counter
from collections.abc import Sequence

from shared.sampling import SamplingParams, uniform


def shaped_logits(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], p: SamplingParams
) -> list[float]:
    """After bias, suppression of end tokens and penalties."""
    shaped = []
    counts = Counter(output)
    for token_id, logit in enumerate(logits):
        logit += p.logit_bias.get(token_id, 0.0)
        if token_id in p.end_token_ids and len(output) < p.min_tokens:
            logit = -math.inf
        if token_id in prompt or token_id in output:
            logit = logit / p.repetition_penalty if logit > 0 else logit * p.repetition_penalty
        logit -= p.frequency_penalty * counts[token_id]
        if token_id in counts:
            logit -= p.presence_penalty
        shaped.append(logit)
    return shaped


def likeliest(logits: Sequence[float]) -> int:
    """The largest logit's token, the lowest id among equals."""
    return min(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def kept_weights(shaped: Sequence[float], p: SamplingParams) -> dict[int, float]:
    """Tokens that may be drawn, by id, with their weights relative to the likeliest; temperature above 0."""
    largest = max(shaped)
    scaled = [_divided(logit - largest, p.temperature) for logit in shaped]
    weights = {token_id: math.exp(value) for token_id, value in enumerate(scaled)}
    ranking = sorted(weights, key=lambda token_id: (-shaped[token_id], token_id))
    if p.top_k:
        ranking = ranking[: p.top_k]
    if p.top_p < 1:
        needed = p.top_p * _sum(weights[token_id] for token_id in sorted(ranking))
        reached, nucleus = 0.0, []
        for token_id in ranking:
            nucleus.append(token_id)
            reached += weights[token_id]
            if reached >= needed:
                break
        ranking = nucleus
    return {token_id: weights[token_id] for token_id in sorted(ranking) if weights[token_id] >= p.min_p}


def drawn(kept: dict[int, float], p: SamplingParams, choice_index: int, position: int) -> tuple[int, float]:
    """The token, and how far the random number was from making it another one."""
    target = uniform(p.seed, choice_index, position) * _sum(kept.values())
    reached, margin = 0.0, math.inf
    for token_id, weight in kept.items():
        reached += weight
        margin = min(margin, abs(reached - target))
        if reached > target:
            return token_id, margin
    raise AssertionError("the random number is below 1")


def logprobs(logits: Sequence[float]) -> list[float]:
    """Of the model's own distribution."""
    largest = max(logits)
    total = math.fsum(math.exp(logit - largest) for logit in logits)
    return [logit - largest - math.log(total) for logit in logits]


def _sum(numbers: object) -> float:
    total = 0.0
    for number in numbers:  # type: ignore[attr-defined]
        total += number
    return total


def _divided(number: float, divisor: float) -> float:
    try:
        return number / divisor
    except OverflowError:
        return -math.inf
