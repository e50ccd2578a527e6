"""A plan at 3 bits, derived twice."""

from __future__ import annotations

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import make_budget
from aatc_cli.console import hushed
from aatc_cli.errors import AatcError
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.allocate import allocate, check


def derived_alike(run: Run) -> Plan:
    """The plan of the paper's recipe in ``run``; raises `AatcError` where it is not derived again to the same."""
    with hushed():
        [plan] = allocate(run, load_recipe("paper"), [make_budget(bits=3.0)])
    if check(plan):
        raise AatcError("the plan is not derived again to the same widths", "report this: it must never happen")
    return plan
