"""Starts one scheduler: `python -m services.scheduler`."""

from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from shared.ids import Service
from shared.process import Parts, run


async def build(parts: Parts[SchedulerConfig]) -> SchedulerService:
    """The scheduler from its parts."""
    return SchedulerService(parts.identity, parts.transport, parts.clock, parts.config)


if __name__ == "__main__":
    run(Service.SCHEDULER, SchedulerConfig, build)
