"""The `shoal` command itself. Subcommands are imported when they are used, so that each needs only its own extras."""

import importlib
import os
import sys
from typing import Final, NoReturn

import click

from shared.errors import OperatorError

_COMMANDS: Final = {
    "up": "Start a whole mesh on this machine.",
    "pull": "Fetch a model into the store.",
    "models": "List the models in the store.",
    "chat": "Talk to a model in the terminal.",
    "status": "Show a mesh's instances, queues and speed, live.",
    "trace": "Show where a request's time went, hop by hop.",
    "usage": "Sum up what requests have consumed, by day, tenant and model.",
    "pin": "Keep a system prompt in the prefix caches of a mesh.",
    "unpin": "Let a pinned prefix go.",
    "replay": "Make a scheduler's recorded decisions again.",
    "evaluate": "Compare number formats by what they cost in quality.",
    "bench": "Measure this machine, or any OpenAI-compatible server.",
    "simulate": "Run the scheduler against simulated executors.",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = importlib.import_module(f"shared.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shoal")
def group() -> None:
    """Shoal serves large language models from a mesh of five small services."""


def main() -> NoReturn:
    """Run a subcommand; an operator's error is one plain sentence, not a traceback."""
    try:
        group(prog_name="shoal", standalone_mode=True)  # also where it is run as a module, as in its image
    except OperatorError as error:
        click.echo(f"shoal: {error}", err=True)
        _leave(2)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _leave(end.code or 0)
    _leave(0)


def _leave(status: int) -> NoReturn:
    """End the process. obstore's threads may still let go of Python objects, which aborts a process that tears down."""
    if "obstore" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
