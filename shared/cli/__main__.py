"""`python -m shared.cli` is the `shoal` command."""

from shared.cli.main import main

main()
