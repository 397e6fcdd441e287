"""What one executor's scheduler is made with, as plain values: the same values always make the same scheduler."""

from dataclasses import dataclass

from services.scheduler.core import policy
from services.scheduler.core.budget import StepLimits
from services.scheduler.core.fairness import FairShares
from services.scheduler.core.prefix_cache import ChainedPrefixCache, NoPrefixCache, PrefixCache
from services.scheduler.core.scheduler import Scheduler
from shared.messages import ExecutorCapacity


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How to plan for one executor, beside its capacity."""

    limits: StepLimits
    max_wait_tokens: int
    """Who has waited while so many tokens were computed goes before everybody."""
    has_prefix_cache: bool = True

    def make_scheduler(
        self,
        capacity: ExecutorCapacity,
        shares: FairShares,
        *,
        cache: PrefixCache | None = None,
        share_prompts: policy.PromptSharing = policy.share_prompt_tokens,
    ) -> Scheduler:
        """An empty scheduler for one executor. The last two are parts of it to exchange, to compare policies."""
        if cache is None:
            cache = ChainedPrefixCache() if self.has_prefix_cache else NoPrefixCache()
        return Scheduler(
            capacity, self.limits, cache, shares, max_wait_tokens=self.max_wait_tokens, share_prompts=share_prompts
        )
