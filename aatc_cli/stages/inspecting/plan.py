"""inspect of a Plan: widths of every site with their histogram, and where the bytes go."""

from __future__ import annotations

from collections import Counter

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
            mean = sum(spent[width] for width in widths[side]) / len(widths[side])
            sites.append({"layer": layer, "side": side, "bits_mean": mean, "histogram": dict(sorted(counts.items()))})
            dropped = counts.get(0, 0)
            rows.append([f"{layer} {side}", f"{mean:.2f}", str(dropped), str(max(counts)), _bars(counts)])
    layout = plan.layout.summary(context)
    manifest = plan.manifest
    data = {
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
        [
            "site",
            "mean bits",
            "dropped",
            "widest",
            "channels at widths 0..16" if spent[1] != 1 else "channels at 0..16 bits",
        ],
        rows,
    )
    if plan.classes.count == 1:
        return Inspection(data, [widths_table, layout_table(layout)])
    facts = class_facts(plan)
    table = Table("token classes, least attended first", CLASS_COLUMNS, class_rows(facts))
    return Inspection(data | {"classes": facts}, [widths_table, table, layout_table(layout)])


def _bars(counts: Counter[int]) -> str:
    peak = max(counts.values())
    return "".join(_BARS[-(-counts.get(bits, 0) * (len(_BARS) - 1) // peak)] for bits in range(17))
