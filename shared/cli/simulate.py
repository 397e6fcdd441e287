"""`shoal simulate`: the real scheduler against simulated executors, to see what its policies buy."""

from shared.cli.forwarded import forwarded

command = forwarded("simulate", "services.scheduler.simulate", "Run the scheduler against simulated executors.")
