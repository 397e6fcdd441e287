"""`shoal bench`: measure this machine, or any OpenAI-compatible server. Prints what it saw, judges nothing."""

import click

from shared.cli.bench.executor_command import executor_command
from shared.cli.bench.load_command import load_command
from shared.cli.bench.mesh_command import mesh_command
from shared.cli.bench.scheduler_command import scheduler_command


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def command(context: click.Context) -> None:
    """Measure speed and cost. Without a subcommand: everything that concerns this machine."""
    if context.invoked_subcommand is None:
        context.invoke(mesh_command)
        context.invoke(scheduler_command, arguments=())
        context.invoke(executor_command, arguments=())


command.add_command(mesh_command)
command.add_command(scheduler_command)
command.add_command(executor_command)
command.add_command(load_command)
