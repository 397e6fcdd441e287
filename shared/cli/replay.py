"""`shoal replay`: make a scheduler's recorded decisions again, and compare each with what was recorded."""

from shared.cli.forwarded import forwarded

command = forwarded("replay", "services.scheduler.replay", "Make a scheduler's recorded decisions again.")
