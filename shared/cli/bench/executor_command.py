"""`shoal bench executor`: where the time of a step goes, measured without the mesh around it."""

from shared.cli.forwarded import forwarded

executor_command = forwarded("executor", "services.executor.bench", "Measure where the time of a step goes.")
