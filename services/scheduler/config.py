"""The scheduler's settings."""

from dataclasses import dataclass
from typing import ClassVar

from services.scheduler.core.budget import StepLimits
from services.scheduler.core.settings import SchedulerSettings
from shared.config import Config, setting
from shared.messages import ExecutorCapacity


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Config):
    """How one scheduler plans."""

    prefix: ClassVar[str] = "SHOAL_SCHEDULER_"

    pipeline_depth: int = setting(2, "steps planned ahead of their results", minimum=1, maximum=8)
    max_step_tokens: int = setting(0, "most tokens computed in a step; 0 is what the executor allows", minimum=0)
    max_chunk_tokens: int = setting(256, "most tokens of one prompt computed in a step", minimum=1)
    target_itl_ms: float = setting(
        60,
        "time between two tokens of running outputs that may be filled with prompts; more if max_slowdown allows it",
        minimum=0,
    )
    max_slowdown: float = setting(
        2.0, "how much longer a step may take when it computes prompts beside outputs", minimum=1.01, maximum=1000
    )
    max_waiting_requests: int = setting(1024, "requests that may wait before others are refused", minimum=1)
    max_waiting_tokens: int = setting(4_000_000, "tokens of theirs, likewise", minimum=1)
    max_tenant_requests: int = setting(0, "requests of one tenant that may wait; 0: as many as of all", minimum=0)
    max_tenant_tokens: int = setting(0, "tokens of theirs; 0: as many as of all", minimum=0)
    tenant_weights: tuple[str, ...] = setting(
        (), "shares of tenants that are not 1, each as tenant=weight, separated by commas"
    )
    max_wait_tokens: int = setting(
        50_000,
        "who has waited while an executor computed so many tokens goes before better priorities, as long as no more"
        " than half of its slots are held by such",
        minimum=0,
    )
    prefix_cache: bool = setting(True, "reuse the blocks of prompts that start alike")
    share_prefixes: bool = setting(False, "reuse them between tenants too")
    recording: str = setting(
        "", "folder in which to record every decision for `shoal replay`, prompts included; empty: record nothing"
    )
    recording_max_mb: int = setting(1024, "size at which a recording ends", minimum=1)
    recording_plans: bool = setting(False, "record whole plans, so that a replay shows in what they differ")
    retain_s: float = setting(
        300.0, "how long the output of a request is kept after its end, for clients that come back for it", minimum=0
    )
    retain_tokens: int = setting(
        2_000_000, "most tokens kept of requests that have ended; the oldest are forgotten first", minimum=0
    )
    orphan_grace_s: float = setting(
        30.0,
        "how long a request whose gateway is lost goes on, for its client to find it from another one",
        minimum=0,
    )
    resend_after_s: float = setting(3.0, "send a plan again when its result is so late", minimum=0.1, maximum=600)

    def __post_init__(self) -> None:
        """Raises ValueError if `tenant_weights` are not what they should be."""
        parse_weights(self.tenant_weights)

    def settings_for(self, capacity: ExecutorCapacity, *, max_plan_bytes: int) -> SchedulerSettings:
        """What the scheduler of one executor is made with; `max_plan_bytes` is what a message may take."""
        limits = StepLimits(
            max_tokens=min(self.max_step_tokens or capacity.max_step_tokens, capacity.max_step_tokens),
            max_chunk_tokens=self.max_chunk_tokens,
            target_step_s=self.target_itl_ms / 1000,
            max_slowdown=self.max_slowdown,
            max_plan_bytes=max_plan_bytes,
        )
        return SchedulerSettings(limits, self.max_wait_tokens, self.prefix_cache)


def parse_weights(pairs: tuple[str, ...]) -> dict[str, float]:
    """The weight of each tenant in `tenant=weight` pairs. Raises ValueError that names one that is none."""
    weights = {}
    for pair in pairs:
        tenant, separator, weight = pair.rpartition("=")
        try:
            weights[tenant] = float(weight)
        except ValueError:
            weights[tenant] = 0.0
        if not (separator and tenant and 0 < weights[tenant] < float("inf")):
            raise ValueError(f"tenant_weights: {pair!r} is not tenant=weight with a positive weight")
    return weights
