"""The stability task of the eval command: recipes and Stats to the stage, one table out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.evals.stability import StabilityResult
    from aatc_cli.models.loading import ModelSource
    from aatc_cli.stages.evaluate import EvalSettings
    from aatc_cli.stages.files import Run
    from aatc_cli.stages.subjects import EvalOptions


def run_stability(
    run: Run, source: ModelSource, recipes: list[str] | None, budgets: list[float] | None, stats: list[Path] | None,
    texts: list[str], settings: EvalSettings, options: EvalOptions, json: bool,
) -> None:  # fmt: skip
    """``--task stability``: every recipe and budget, calibrated on each of ``stats``; raises `UsageError`."""
    from aatc_cli.config import make_budget
    from aatc_cli.errors import UsageError
    from aatc_cli.profiles import load_recipe
    from aatc_cli.stages.stability import stability

    if not budgets:
        raise UsageError("stability needs a budget to plan at", "add --budget 2")
    results = [
        stability(run, source, load_recipe(name), make_budget(bits=bits), stats or [], texts, settings, options)
        for name in recipes or ["paper"]
        for bits in budgets
    ]
    _print(results, json)


def _print(results: list[StabilityResult], json: bool) -> None:
    from aatc_cli.console import print_json, print_table

    if json:
        print_json([result.model_dump(mode="json") for result in results])
        return
    columns = ["plan", "calibrated on", "text", "bits", "KL (nats)", "predicted", "by the other Stats"]
    columns.append("largest / smallest")
    rows = []
    for result in results:
        for row in result.rows:
            kl = f"{row.kl_mean:.3g}" + ("" if row.kl_stderr is None else f" ± {row.kl_stderr:.2g}")
            forecasts = ["" if value is None else f"{value:.3g}" for value in (row.predicted, row.predicted_elsewhere)]
            ratio = result.kl_spread.get(row.text)
            rows.append([
                result.method, row.stats, row.text, f"{row.bits:.4g}", kl, *forecasts,
                "" if ratio is None else f"{ratio:.3g}",
            ])  # fmt: skip
    print_table("stability", columns, rows)
