"""The scheduler as it is, and what it is compared with: the same parts, with one of them exchanged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from services.scheduler.config import SchedulerConfig
from services.scheduler.core import policy as core_policy
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.placement import Placement, SoonestPlacement
from services.scheduler.core.prefix_cache import ChainedPrefixCache, NoPrefixCache, PrefixCache
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from shared.messages import ExecutorCapacity

_MAX_PLAN_BYTES: Final = 1 << 20
"""What a NATS server takes unless told otherwise."""


def share_in_order(needs: Sequence[int], budget: int, max_chunk_tokens: int) -> list[int]:
    """All of a step's prompt tokens by place: the twin of `core.policy.share_prompt_tokens`."""
    shares = []
    for need in needs:
        shares.append(min(need, budget, max_chunk_tokens))
        budget -= shares[-1]
    return shares


class RandomPlacement:
    """Any executor, and there a request stays: the twin of `core.placement.SoonestPlacement`."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, request: Request, able: Sequence[Scheduler]) -> Scheduler:
        """Any of them."""
        return self._random.choice(able)

    def should_move(self, request: Request, busy: Scheduler, idle: Scheduler) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to schedule."""

    name: str
    description: str
    make_cache: Callable[[], PrefixCache] = ChainedPrefixCache
    make_placement: Callable[[Random], Placement] = lambda _random: SoonestPlacement()
    share_prompts: core_policy.PromptSharing = core_policy.share_prompt_tokens
    tells_tenants: bool = True
    """Whether the scheduler is told whose each request is. To one that is not, all are alike but for their arrival."""

    def make_fleet(self, config: SchedulerConfig, random: Random) -> Fleet:
        """A fleet without executors that schedules in this way."""

        def make_scheduler(capacity: ExecutorCapacity, shares: FairShares) -> Scheduler:
            settings = config.settings_for(capacity, max_plan_bytes=_MAX_PLAN_BYTES)
            return settings.make_scheduler(capacity, shares, cache=self.make_cache(), share_prompts=self.share_prompts)

        return Fleet(make_scheduler, placement=self.make_placement(random))


SHOAL: Final = Policy("shoal", "the scheduler as it is")
FCFS: Final = Policy(
    "fcfs",
    "first come, first served: tenants and lengths of prompts make no difference",
    share_prompts=share_in_order,
    tells_tenants=False,
)
NO_CACHE: Final = Policy("no-cache", "every prompt is computed from its first token", make_cache=NoPrefixCache)
RANDOM_PLACEMENT: Final = Policy(
    "random-placement", "a request waits on any executor, and stays there", make_placement=RandomPlacement
)

POLICIES: Final = {policy.name: policy for policy in (SHOAL, FCFS, NO_CACHE, RANDOM_PLACEMENT)}
