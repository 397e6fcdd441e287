"""Starts one scheduler: `python -m services.scheduler`."""

from pathlib import Path

from services.scheduler.config import SchedulerConfig
from services.scheduler.garbage import collect_rarely
from services.scheduler.recording.recording import start_recording
from services.scheduler.service import SchedulerService
from shared.ids import Service
from shared.process import Parts, run


async def build(parts: Parts[SchedulerConfig]) -> SchedulerService:
    """The scheduler from its parts."""
    config = parts.config
    recording = None
    if config.recording:
        recording = start_recording(
            Path(config.recording),
            parts.identity.instance_id,
            parts.clock,
            max_bytes=config.recording_max_mb << 20,
            keeps_plans=config.recording_plans,
        )
    return SchedulerService(parts.identity, parts.transport, parts.clock, config, recording, parts.tracing)


if __name__ == "__main__":
    collect_rarely()
    run(Service.SCHEDULER, SchedulerConfig, build)
