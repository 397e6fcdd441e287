"""Whose turn it is on one executor: who of those that wait is let in, in which order, and who gives way for that.

Decides and changes nothing but the count of those that were let past others. The order is the queue's, how many go by
age is the slots', who may be displaced by whom is the policy's.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from services.scheduler.core import policy
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.preemption import victims_for
from services.scheduler.core.prefix_wait import ComingPrefixes
from services.scheduler.core.request import Choice
from services.scheduler.core.slots import Slots
from services.scheduler.core.waiting import WaitingQueue

_MAX_HASHED: Final = 16


class Turns:
    """The turns of those that wait."""

    def __init__(self, waiting: WaitingQueue, slots: Slots, blocks: BlockManager) -> None:
        self._waiting = waiting
        self._slots = slots
        self._blocks = blocks
        self._room = policy.Room(slots.max_slots, blocks.pool.num_blocks)

    def claim(self, running: Sequence[Choice]) -> tuple[Choice | None, list[Choice]]:
        """Who is to be let in before all others, and who has to give way to it; nobody, if the order will do.

        If whoever is next goes by age and does not fit, though all gave way that have to, one with more right may go
        past it.
        """
        newcomer = self._next(running, self._slots.num_by_age_left)
        if newcomer is None:
            return None, []
        victims = self._victims_for(newcomer, running)
        if victims is None and self._waiting.is_overdue(newcomer) and self._slots.may_let_past:
            return self._go_past(newcomer, running)
        return (newcomer, victims) if victims else (None, [])

    def order(self, newcomer: Choice | None) -> Iterator[Choice]:
        """Those that wait, in order, but first the newcomer for whom others were preempted: they wait too now, and one
        may be before it in order."""
        if newcomer is not None:
            yield newcomer
        for choice in _within_reach(self._waiting.in_order(self._slots.num_by_age_left)):
            if choice is not newcomer:
                yield choice

    def _go_past(self, overdue: Choice, running: Sequence[Choice]) -> tuple[Choice | None, list[Choice]]:
        """Whoever would be next if nobody went by age, if it fits, and has a better priority or others to displace."""
        better = self._next(running, 0)
        if better is None or better is overdue:
            return None, []
        victims = self._victims_for(better, running)
        if victims is None or not (victims or better.request.priority < overdue.request.priority):
            return None, []
        self._slots.let_past(better)
        return better, victims

    def _next(self, running: Sequence[Choice], max_by_age: int) -> Choice | None:
        """The first that waits, but for those that wait for a prefix; None if it is one with a token on its way."""
        coming: ComingPrefixes | None = None
        for choice in _within_reach(self._waiting.in_order(max_by_age)):
            if choice.num_in_flight:
                return None
            coming = coming or ComingPrefixes(self._blocks, running)
            if not coming.has_of(choice):
                return choice
        return None

    def _victims_for(self, newcomer: Choice, running: Sequence[Choice]) -> list[Choice] | None:
        """Who has to give way so that it is admitted in this step; None if it cannot be."""
        candidates = policy.who_gives_way(newcomer, running, self._waiting.tenants, self._waiting.shares, self._room)
        return victims_for(newcomer, running, candidates, self._blocks, self._room.max_slots)


def _within_reach(choices: Iterable[Choice]) -> Iterator[Choice]:
    """As many as a step looks at: of prompts that were not looked at before a few only, since they must be hashed."""
    num_left = _MAX_HASHED
    for choice in choices:
        if choice.key_chain is None:
            if num_left == 0:
                return
            num_left -= 1
        yield choice
