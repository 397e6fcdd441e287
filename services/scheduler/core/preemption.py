"""How many of those that have to give way are preempted so that one that waits gets in. Who has to is `policy`'s."""

from collections.abc import Iterable, Sequence

from services.scheduler.core import policy
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.request import Choice


def victims_for(
    newcomer: Choice, running: Sequence[Choice], candidates: Iterable[Choice], blocks: BlockManager, max_slots: int
) -> list[Choice]:
    """As many of the candidates, in their order, as it takes to admit the newcomer in this very step.

    Empty if it can be admitted without, or if all of them would not be enough: nobody is preempted in vain.

    Beside the newcomer's blocks there must be those that the others take in this step, and the headroom of admission.
    """
    lack = blocks.lack(newcomer)
    num_growing = sum(map(blocks.is_growing, running))
    num_running = len(running)

    def is_enough() -> bool:
        to_keep_free = policy.admission_headroom(num_running) + num_growing
        return num_running < max_slots and lack.num_blocks + to_keep_free <= 0

    victims: list[Choice] = []
    if is_enough():
        return victims
    for choice in candidates:
        victims.append(choice)
        lack.give_up(choice)
        num_growing -= blocks.is_growing(choice)
        num_running -= 1
        if is_enough():
            return victims
    return []
