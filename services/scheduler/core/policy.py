"""Who goes first, who gives way, and how many tokens each gets in a step. Functions of what is there, no state."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.scheduler.core.request import Choice


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may hold."""

    max_tokens: int
    """Tokens computed in a step. At least the number of slots, so that every running choice can go on."""
    max_chunk_tokens: int
    """Tokens that one choice computes in a step: a longer prompt is computed in several."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_chunk_tokens < 1:
            raise ValueError("a step must hold at least one token, and so must a chunk")


def share_budget(needs: Sequence[int], limits: StepLimits) -> list[int]:
    """How many tokens each of those who need `needs` gets, in order of place.

    Everyone gets one token first, so that running outputs keep flowing while a long prompt is computed; what is left
    goes to the first in order, up to a chunk each.
    """
    if sum(needs) <= limits.max_tokens and max(needs, default=0) <= limits.max_chunk_tokens:
        return list(needs)
    left = limits.max_tokens
    shares = []
    for need in needs:
        share = min(need, 1, left)
        shares.append(share)
        left -= share
    for index, need in enumerate(needs):
        extra = min(need, limits.max_chunk_tokens) - shares[index]
        if extra > 0 and left > 0:
            shares[index] += min(extra, left)
            left -= min(extra, left)
    return shares


def victim(running: Sequence[Choice]) -> Choice:
    """Who gives up its blocks when they are short: the last in order."""
    return running[-1]


def admission_headroom(num_running: int) -> int:
    """Blocks that must stay free when another choice is admitted: one for each that runs, its next.

    Without it, an admission would be undone by preemption as soon as the others grow.
    """
    return num_running
