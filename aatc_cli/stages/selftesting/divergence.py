"""The task kl on a plan of the selftest: uncompressed below compressed, and neither absurd."""

from __future__ import annotations

from aatc_cli.artifacts.evaluation import Evaluation
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.console import hushed
from aatc_cli.errors import AatcError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.kl.settings import Settings
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.loading import ModelSource
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.eval import evaluate


def divergence_grows(run: Run, source: ModelSource, plan: Plan, text: str, length: int) -> str:
    """KL without compression and with the plan, for people; raises `AatcError` where they cannot be right."""
    settings = Settings(text=(text,), length=length, limit=1, first=140)
    subjects = [Subject(load_recipe("fp16"), None), Subject(plan.recipe, plan)]
    call = Call(run, EvalOptions(), source, subjects=subjects)
    with hushed():
        found = evaluate(find_task("kl"), call, settings)
    low, high = (one.kl_mean if isinstance(one, Evaluation) else None for one in found)
    if low is None or high is None or not low < high < 10:
        raise AatcError(f"KL of {low} nats uncompressed and {high} at 3 bits", "report this: it must never happen")
    return f"KL {low:.2g} nats in float16, {high:.2g} at 3 bits"
