"""The scheduler's settings."""

from dataclasses import dataclass
from typing import ClassVar

from shared.config import Config, setting


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Config):
    """How one scheduler plans."""

    prefix: ClassVar[str] = "SHOAL_SCHEDULER_"

    pipeline_depth: int = setting(2, "steps planned ahead of their results", minimum=1, maximum=8)
    max_step_tokens: int = setting(0, "most tokens computed in a step; 0 is what the executor allows", minimum=0)
    max_chunk_tokens: int = setting(256, "most tokens of one prompt computed in a step", minimum=1)
    max_waiting_requests: int = setting(1024, "requests that may wait before others are refused", minimum=1)
    prefix_cache: bool = setting(True, "reuse the blocks of prompts that start alike")
    share_prefixes: bool = setting(False, "reuse them between tenants too")
    resend_after_s: float = setting(3.0, "send a plan again when its result is so late", minimum=0.1, maximum=600)
