"""The application and what it answers without a command."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from aatc_cli.cli.loudness import Commands
from aatc_cli.cli.making import MadeCommand
from aatc_cli.version import __version__

# the order of the pipeline, which is the order of the help
_ORDER = (
    *("collect", "whiten", "allocate", "inspect", "eval", "study", "report", "pick", "export", "serve"),
    *("cache", "advise", "list", "doctor"),
)


class Ordered(TyperGroup):
    """The commands in their order, where typer would put groups last, with those that are made of settings."""

    made: ClassVar[list[MadeCommand]] = []

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {**self.commands, **{str(command.name): command for command in self.made}}

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands."""
        return sorted(super().list_commands(ctx), key=_ORDER.index)


app = Commands(
    name="aatc",
    cls=Ordered,
    help="Compress the key-value cache of a language model by attention-aware transform coding.\n\n"
    "Stages: collect -> whiten -> allocate -> inspect -> eval or study -> report. Each reads artifacts from a run "
    "directory (--run, default $AATC_RUN or ./run) and writes one. Data goes to stdout, progress and log to stderr.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Answer --version, and no command with the help; everything else is a command."""
    if version:
        typer.echo(f"aatc {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
