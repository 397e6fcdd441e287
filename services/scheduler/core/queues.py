"""The two queues of one executor: who runs, each with a slot and blocks, and who waits; and every move between them.

Keeps count of the tokens that are still to be computed. Whose turn it is, and what a step computes, is decided
elsewhere.
"""

from bisect import insort
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.request import Choice, ChoiceState
from services.scheduler.core.slots import Slots
from services.scheduler.core.waiting import WaitingQueue

_place = attrgetter("place")


class Queues:
    """Those that run and those that wait."""

    def __init__(self, waiting: WaitingQueue, slots: Slots, blocks: BlockManager) -> None:
        self.running: list[Choice] = []
        """In order of place."""
        self.waiting = waiting
        self.num_outstanding_tokens = 0
        """Tokens known but not computed, of all that run and wait; those in flight count as computed. The scheduler
        counts those that steps compute and sample."""
        self.num_preemptions = 0
        self._slots = slots
        self._blocks = blocks

    def add(self, choice: Choice) -> None:
        """Have a choice wait."""
        self.waiting.add(choice)
        self.num_outstanding_tokens += choice.num_uncomputed_tokens

    def withdraw(self, choice: Choice) -> None:
        """Let go of a choice that waits."""
        self.waiting.remove(choice)
        self.num_outstanding_tokens -= choice.num_uncomputed_tokens
        choice.key_chain = None

    def seat(self, choice: Choice) -> None:
        """Have a choice run that waits and has its blocks. There must be a free slot."""
        is_overdue = self.waiting.is_overdue(choice)
        self.waiting.remove(choice)
        self.num_outstanding_tokens -= choice.num_computed_tokens
        choice.num_tokens_charged = max(choice.num_tokens_charged, choice.num_computed_tokens)
        if choice.state is ChoiceState.WAITING and choice.index == 0:
            choice.request.num_cached_tokens = choice.num_computed_tokens
        choice.move_to(ChoiceState.RUNNING)
        self._slots.give(choice, is_overdue=is_overdue)
        insort(self.running, choice, key=_place)

    def let_wait(self, choices: Iterable[Choice], num_tokens: int) -> None:
        """Running choices got nothing of a step of so many tokens: that is waiting too."""
        for choice in choices:
            choice.num_tokens_waited += num_tokens
            if choice.num_tokens_waited >= self.waiting.max_wait_tokens and self._slots.num_by_age_left:
                self._slots.promote(choice)
        self.running.sort(key=_place)

    def preempt(self, choice: Choice) -> None:
        """Take slot and blocks from one that runs: it waits again, at its old place."""
        self._unseat(choice)
        self.running.remove(choice)
        choice.move_to(ChoiceState.PREEMPTED)
        self.waiting.add(choice)
        self.num_preemptions += 1

    def finish(self, choice: Choice) -> None:
        """Nothing more will come of a choice, whatever it is doing."""
        if choice.state is ChoiceState.RUNNING:
            self._unseat(choice)
            self.running.remove(choice)
            self.num_outstanding_tokens -= choice.num_uncomputed_tokens
        elif choice in self.waiting:
            self.waiting.remove(choice)
            self.num_outstanding_tokens -= choice.num_uncomputed_tokens
        choice.move_to(ChoiceState.FINISHED)

    def evacuate(self) -> None:
        """Let all go, for another executor; those that ran as if they had been preempted."""
        for choice in self.running:
            self._unseat(choice)
            choice.move_to(ChoiceState.PREEMPTED)
        self.running.clear()
        for choice in self.waiting:
            choice.key_chain = None
        self.waiting.clear()
        self.num_outstanding_tokens = 0

    def check_invariants(self) -> None:
        """Raise AssertionError if queues and slots do not agree with one another and with their choices."""
        self._slots.check_invariants(self.running)
        self.waiting.check_invariants()
        assert self.running == sorted(self.running, key=_place), "those that run are out of order"
        outstanding = sum(choice.num_uncomputed_tokens for choice in chain(self.running, self.waiting))
        assert self.num_outstanding_tokens == outstanding, f"{self.num_outstanding_tokens} tokens, not {outstanding}"
        assert all(choice.state is ChoiceState.RUNNING for choice in self.running), "not running"
        assert all(c.state in (ChoiceState.WAITING, ChoiceState.PREEMPTED) for c in self.waiting), "not waiting"
        assert all(c.slot is None and not c.block_table for c in self.waiting), "a waiting choice holds something"

    def _unseat(self, choice: Choice) -> None:
        self.num_outstanding_tokens += choice.num_computed_tokens
        self._blocks.commit(choice)
        self._blocks.free(choice)
        self._slots.take_back(choice)
