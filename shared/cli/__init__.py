"""The `shoal` command: one module a subcommand."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  # said before anything newer is imported
    sys.exit(f"shoal: Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
