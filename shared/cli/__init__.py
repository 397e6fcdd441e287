"""The `shoal` command: one module a subcommand."""
