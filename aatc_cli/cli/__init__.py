"""The command line: parse, validate, call one stage, print. Nothing heavy is imported before a command runs."""

from aatc_cli.cli.allocate import allocate, allocate_parameters
from aatc_cli.cli.app import Ordered, app
from aatc_cli.cli.cache import add_stored
from aatc_cli.cli.collect import collect, collect_parameters
from aatc_cli.cli.doctor import doctor
from aatc_cli.cli.evaluate import tasks
from aatc_cli.cli.export import export
from aatc_cli.cli.inspect import inspect, inspect_parameters
from aatc_cli.cli.known import list_known
from aatc_cli.cli.making import MadeCommand
from aatc_cli.cli.pick import pick
from aatc_cli.cli.report import report
from aatc_cli.cli.study import study, study_parameters
from aatc_cli.cli.whiten import whiten, whiten_parameters

__all__ = ["app"]

# those whose options are made of settings
Ordered.made += [
    MadeCommand(collect, collect_parameters),
    MadeCommand(whiten, whiten_parameters),
    MadeCommand(allocate, allocate_parameters),
    MadeCommand(inspect, inspect_parameters),
    MadeCommand(study, study_parameters),
]
app.add_typer(tasks, name="eval")
app.command()(report)
app.command()(pick)
app.command()(export)
add_stored(app)
app.command(name="list")(list_known)
app.command()(doctor)
