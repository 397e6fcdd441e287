"""Who waits for a prefix that another computes at this moment: it need only wait, and finds it in the cache then.

Made anew for each step. Whoever has the block that a running prompt computes next has all blocks before it too, since
keys are chained; so each that waits costs a look-up, however many there are and however long what they share.
"""

from collections.abc import Iterable
from math import inf

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.request import Choice


class ComingPrefixes:
    """The prefixes that choices are computing in one step."""

    def __init__(self, blocks: BlockManager, choices: Iterable[Choice]) -> None:
        """`choices` are those that run; those that do not compute prompts make no difference."""
        self._blocks = blocks
        self._coming: dict[int, dict[bytes, float]] = {}
        """Of each block that is computed next, by its place in the prompt: the best place of those that compute it."""
        for choice in choices:
            self.add(choice)

    def add(self, choice: Choice) -> None:
        """One more runs."""
        at, chain = choice.num_committed_blocks, choice.key_chain
        if choice.num_tokens_to_compute > 1 and chain is not None and at < len(chain.keys) and self._blocks.can_share:
            best = self._coming.setdefault(at, {})
            digest = chain.keys[at].digest
            best[digest] = min(choice.place[0], best.get(digest, inf))

    def has_of(self, choice: Choice) -> bool:
        """Whether one of no worse priority computes a block that a choice has too, and that it would compute next."""
        if not self._coming:
            return False
        keys = self._blocks.keys_of(choice)
        for at, best in self._coming.items():
            if at < len(keys) and best.get(keys[at].digest, inf) <= choice.place[0]:
                return True
        return False
