"""`python -m shared.cli` is the `shoal` command."""

from shared.cli.command import run

run()
