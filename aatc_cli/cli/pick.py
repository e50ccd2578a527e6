"""The command pick: one path on stdout, for scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aatc_cli.cli.options import JsonOption, RecipeOption, RunOption


def pick(
    kl: Annotated[float, typer.Option("--kl", help="KL in nats per token that the plan may have at most.")],
    run: RunOption = Path("run"),
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="Text that it must hold on, as evaluated; repeatable. Default: every one."),
    ] = None,
    recipe: RecipeOption = None,
    context: Annotated[
        int, typer.Option("--context", min=1, max=2**40, help="Tokens at which bytes are compared.")
    ] = 8192,
    json: JsonOption = False,
) -> None:
    """Print the path of the smallest plan of the run whose measured KL is low enough.

    Exit code 1 when none is. Example: aatc export $(aatc pick --kl 0.01) shipped
    """
    from aatc_cli.artifacts.run import Run
    from aatc_cli.console import print_json
    from aatc_cli.stages.pick import Wish
    from aatc_cli.stages.pick import pick as stage

    found = stage(Run(run), Wish(kl, tuple(text or ()), tuple(recipe or ()), context))
    if json:
        print_json(found)
    else:
        typer.echo(found["path"])
