"""How many of those that have to give way are preempted so that one that waits gets in. Who has to is `policy`'s."""

from collections.abc import Iterable, Sequence

from services.scheduler.core import policy
from services.scheduler.core.block_manager import BlockManager
from services.scheduler.core.request import Choice


def victims_for(
    newcomer: Choice, running: Sequence[Choice], candidates: Iterable[Choice], blocks: BlockManager, max_slots: int
) -> list[Choice] | None:
    """As many of the candidates, in their order, as it takes to admit the newcomer in this very step.

    None of them if it can be admitted without; None if all of them would not be enough: nobody is preempted in vain.

    Beside the newcomer's blocks there must be those that the others take in this step, and the headroom of admission.
    """
    num_running = len(running)
    num_growing = sum(map(blocks.is_growing, running))

    def to_keep_free() -> int:
        return policy.admission_headroom(num_running) + num_growing

    if num_running < max_slots and blocks.can_admit(newcomer, to_keep_free()):
        return []
    victims: list[Choice] = []
    lack = None
    for choice in candidates:
        lack = lack or blocks.lack(newcomer)
        victims.append(choice)
        lack.give_up(choice)
        num_growing -= blocks.is_growing(choice)
        num_running -= 1
        if num_running < max_slots and lack.num_blocks + to_keep_free() <= 0:
            return victims
    return None
