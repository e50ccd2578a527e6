"""inspect of a Plan: widths of every site with their histogram, and where the bytes go."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES
from aatc_cli.stages.inspecting.classes import COLUMNS as CLASS_COLUMNS
from aatc_cli.stages.inspecting.classes import class_facts, class_rows
from aatc_cli.stages.inspecting.facts import Inspection, Table, layout_table

# the first stands for no channel at all: a space would be trimmed and the columns would no longer line up
_BARS = "·▁▂▃▄▅▆▇█"


def inspect_plan(plan: Plan, context: int) -> Inspection:
    """Widths of every site with their histogram, and where the bytes go at ``context`` tokens."""
    sites, rows, spent = [], [], plan.bits_of_width
    for layer, widths in enumerate(plan.bits):
        for side in SIDES:
            counts = Counter(widths[side])
            mean = _mean([spent[width] for width in widths[side]], plan.classes.shares)
            sites.append({"layer": layer, "side": side, "bits_mean": mean, "histogram": dict(sorted(counts.items()))})
            dropped = counts.get(0, 0)
            rows.append([f"{layer} {side}", f"{mean:.2f}", str(dropped), str(max(counts)), _bars(counts)])
    layout = plan.layout.summary(context)
    manifest = plan.manifest
    data: dict[str, Any] = {
        "kind": "plan",
        "digest": manifest.digest,
        "recipe": plan.recipe.name,
        "budget": plan.budget.label,
        "model": manifest.model.model_dump(mode="json"),
        "bits_mean": plan.mean_bits,
        "results": manifest.results,
        "inputs": manifest.inputs,
        "layout": layout,
        "sites": sites,
    }
    widths_table = Table(
        f"plan {plan.name} for {manifest.model.name}: {plan.mean_bits:.3f} bits per channel, "
        f"{plan.layout.bits_packed:.3f} with all that is packed",
        ["site", "mean bits", "dropped", "widest", f"channels at {'0..16 bits' if spent[1] == 1 else 'widths 0..16'}"],
        rows,
    )
    tables = [widths_table]
    forecast = kl_forecast(plan)
    if forecast is not None:
        data["forecast"] = forecast
        tables.append(_forecast_table(forecast))
    if plan.classes.count > 1:
        data["classes"] = facts = class_facts(plan)
        tables.append(Table("token classes, least attended first", CLASS_COLUMNS, class_rows(facts)))
    return Inspection(data, [*tables, layout_table(layout)])


def kl_forecast(plan: Plan) -> dict[str, Any] | None:
    """KL in nats per token that a plan is forecast to have, and the range that was measured on other text, over it.

    To second order, for text like the calibration's; None where the weights are not in nats.
    """
    choices = plan.recipe.choices
    if not all(choices.weight(side).in_nats for side in SIDES):
        return None
    kl = sum(plan.predicted.values())
    low, high = choices.classes.over_forecast
    return {"kl": kl, "over_forecast": [low, high], "kl_other_text": [low * kl, high * kl]}


def _forecast_table(forecast: Mapping[str, Any]) -> Table:
    low, high = forecast["over_forecast"]
    other = " to ".join(f"{kl:.2g}" for kl in forecast["kl_other_text"])
    columns = ["on text like the calibration's", f"measured on other text: {low:g} to {high:g} times"]
    return Table("forecast of KL, nats per token", columns, [[f"{forecast['kl']:.2g}", other]])


def _mean(bits: Sequence[float], shares: Sequence[float]) -> float:
    """Mean bits of a site over its channels and the classes of tokens, whose channels lie one after another."""
    size = len(bits) // len(shares)
    return math.fsum(share * sum(bits[k * size : (k + 1) * size]) for k, share in enumerate(shares)) / size


def _bars(counts: Counter[int]) -> str:
    peak = max(counts.values())
    return "".join(_BARS[-(-counts.get(bits, 0) * (len(_BARS) - 1) // peak)] for bits in range(17))
