"""`shoal bench scheduler`: what a step costs the scheduler, alone."""

from shared.cli.forwarded import forwarded

scheduler_command = forwarded("scheduler", "services.scheduler.bench", "Measure what a step costs the scheduler.")
