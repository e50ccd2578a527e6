"""The command line: parse, validate, call one stage, print. Nothing heavy is imported before a command runs."""

from aatc_cli.cli.allocate import allocate
from aatc_cli.cli.app import app
from aatc_cli.cli.doctor import doctor
from aatc_cli.cli.evaluate import tasks
from aatc_cli.cli.export import export
from aatc_cli.cli.known import list_known
from aatc_cli.cli.look import inspect, report
from aatc_cli.cli.making import spreading_as
from aatc_cli.cli.offline import collect, whiten
from aatc_cli.cli.pick import pick
from aatc_cli.cli.study import study

__all__ = ["app"]

# in the order of the pipeline, which is the order of the help
app.command(cls=spreading_as(collect))(collect)
app.command()(whiten)
app.command(cls=spreading_as(allocate))(allocate)
app.command()(inspect)
app.add_typer(tasks, name="eval")
app.command(cls=spreading_as(study))(study)
app.command()(report)
app.command()(pick)
app.command()(export)
# and what is asked at any time
app.command(name="list")(list_known)
app.command()(doctor)
