"""Who gives way to whom, and how a step's tokens are shared. Functions of what is there, without state."""

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import fsum
from typing import Final

from services.scheduler.core.fairness import FairShares
from services.scheduler.core.request import Choice

PromptSharing = Callable[[Sequence[int], int, int], list[int]]
"""From what each prompt needs, in order of place, a step's budget and the longest chunk: what each gets."""

MAX_TIMES_GIVING_WAY: Final = 2
"""So often a choice may be preempted for the sake of another tenant; then it runs to its end."""


def share_prompt_tokens(needs: Sequence[int], budget: int, max_chunk_tokens: int) -> list[int]:
    """How many tokens each prompt gets in a step, at most a chunk each; `needs` are in order of place.

    One half goes by place, so that whoever was first makes progress however many others come. The other half, and
    what is left of the first, goes to the shortest first, so that a short prompt does not wait for a long one.
    """
    shares = [0] * len(needs)
    by_place = budget - budget // 2
    left = budget - by_place
    for index, need in enumerate(needs):
        shares[index] = min(need, by_place, max_chunk_tokens)
        by_place -= shares[index]
    left += by_place
    for index in sorted(range(len(needs)), key=lambda index: needs[index]):
        extra = min(needs[index] - shares[index], left, max_chunk_tokens - shares[index])
        shares[index] += extra
        left -= extra
    return shares


def first_victim(running: Sequence[Choice]) -> Choice:
    """Who gives up its blocks when those that run need more than there are: the last in order."""
    return running[-1]


def admission_headroom(num_running: int) -> int:
    """Blocks that must stay free when another choice is admitted: one for each that runs, its next.

    Without it, an admission would be undone by preemption as soon as the others grow.
    """
    return num_running


@dataclass(frozen=True, slots=True)
class Room:
    """How much an executor holds."""

    max_slots: int
    num_blocks: int


def who_gives_way(
    newcomer: Choice, running: Sequence[Choice], tenants: Set[str], shares: FairShares, room: Room
) -> Iterator[Choice]:
    """Those that would be preempted to make room for one that waits, in the order in which they would.

    First whoever has a worse priority, the last in order first. Then, if the newcomer's tenant has less than its fair
    part of the executor, the last in order of tenants that have more than theirs, as long as they keep theirs.
    `tenants` are those that wait there: they share it with those that run.
    """
    priority = newcomer.request.priority
    for choice in reversed(running):
        if choice.place[0] > priority:
            yield choice
    holdings: dict[str, _Holding] = {}
    for choice in running:
        if choice.place[0] <= priority:
            holdings.setdefault(choice.request.tenant, _Holding(room, priority)).add(choice)
    everybody = tenants | {choice.request.tenant for choice in running}
    total_weight = fsum(map(shares.weight, everybody))  # exact, so a set's order does not matter
    mine = holdings.pop(newcomer.request.tenant, None)
    if mine is not None and mine.part >= shares.weight(newcomer.request.tenant) / total_weight:
        return
    for tenant, holding in sorted(holdings.items(), key=lambda item: -item[1].part / shares.weight(item[0])):
        fair = shares.weight(tenant) / total_weight
        while (spare := holding.spare(fair)) is not None:
            yield spare


class _Holding:
    """What one tenant holds of an executor, and which of its choices may give way to another tenant, the last first."""

    def __init__(self, room: Room, priority: int) -> None:
        self._room = room
        self._priority = priority
        self._num_choices = self._num_blocks = 0
        self._may_give_way: list[Choice] = []

    def add(self, choice: Choice) -> None:
        self._num_choices += 1
        self._num_blocks += len(choice.block_table)
        if choice.place[0] == self._priority and choice.num_times_gave_way < MAX_TIMES_GIVING_WAY:
            self._may_give_way.append(choice)

    @property
    def part(self) -> float:
        """The part of its slots or of its blocks, whichever is more."""
        return max(self._num_choices / self._room.max_slots, self._num_blocks / self._room.num_blocks)

    def spare(self, fair: float) -> Choice | None:
        """The last that may give way, taken out, if the tenant keeps a fair part without it."""
        if not self._may_give_way:
            return None
        last = self._may_give_way.pop()
        self._num_choices -= 1
        self._num_blocks -= len(last.block_table)
        return last if self.part >= fair else None
