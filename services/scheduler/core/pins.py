"""Prefixes that stay in an executor's cache although no request holds them: system prompts that everybody uses.

A pinned prefix is computed once, as a request of its own with one token to generate, and its full blocks are held from
then on. Where others could not go on without them, pins give way.
"""

from typing import NamedTuple

from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.request import Request
from shared.ids import BlockId
from shared.messages import Int32Array


class Pin(NamedTuple):
    """What is pinned."""

    name: str
    model: str
    token_ids: Int32Array
    salts: tuple[tuple[str, str], ...] = ()
    """As of the requests that shall find it."""
    tenant: str = ""


class PinnedBlocks:
    """The blocks of one executor that are held by pins."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._held: dict[str, list[BlockId]] = {}
        self._num_pins_of: dict[BlockId, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks held, each counted once however many pins share it."""
        return len(self._num_pins_of)

    def hold(self, name: str, request: Request) -> None:
        """Hold the blocks of a request's prompt that are in the cache now, instead of what `name` held before."""
        blocks = self._blocks.cache.match(request.prompt_chain(self._blocks.block_size).keys)
        for block in blocks:
            self._blocks.pool.hold(block)
            self._num_pins_of[block] = self._num_pins_of.get(block, 0) + 1
        self.free(name)
        self._held[name] = blocks

    def give_up(self, name: str) -> None:
        """Hold nothing for a pin, for good: it cannot be computed here. As if it were held, until it is freed."""
        self._held[name] = []

    def free(self, name: str) -> None:
        """Hold the blocks of a pin no longer; nothing if it holds none."""
        for block in reversed(self._held.pop(name, [])):
            self._blocks.free_block(block)
            self._num_pins_of[block] -= 1
            if self._num_pins_of[block] == 0:
                del self._num_pins_of[block]

    def give_way(self) -> bool:
        """Free the pin that holds most. False if there is none."""
        if not self._held:
            return False
        self.free(max(self._held, key=lambda name: len(self._held[name])))
        return True

    def counted(self) -> list[BlockId]:
        """Each block as often as it is held."""
        return [block for blocks in self._held.values() for block in blocks]

    def __contains__(self, name: object) -> bool:
        return name in self._held
