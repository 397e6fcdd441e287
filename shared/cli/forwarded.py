"""Subcommands that a service's own package carries out, in a process of its own: `shared` imports no service."""

import subprocess
import sys
from importlib.util import find_spec

import click

from shared.errors import OperatorError


def forwarded(name: str, module: str, short_help: str) -> click.Command:
    """The command that runs `python -m module` with its own arguments, `--help` among them, and ends as that does."""

    @click.command(
        name,
        short_help=short_help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        check_is_installed(module)
        try:
            status = subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
        except KeyboardInterrupt:  # the other process has heard of it too
            status = 130
        if status:
            sys.exit(status if status > 0 else 128 - status)

    return command


def check_is_installed(module: str) -> None:
    """Raises OperatorError that says what to install if a service's module is not there."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        service = module.split(".")[1]
        raise OperatorError(f"this command needs the {service}, which is not installed: pip install 'shoal[{service}]'")
