"""inspect of a profile: the byte law at a budget and the memory of collect, with no model and no plan at hand."""

from __future__ import annotations

from aatc_cli.config import Budget, HeadGroups
from aatc_cli.errors import UsageError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import ModelProfile
from aatc_cli.stages.allocate import allowed_bytes
from aatc_cli.stages.inspecting.facts import Inspection, Table, layout_table
from aatc_cli.stages.inspecting.stats_size import ROWS, stats_bytes


def inspect_profile(profile: ModelProfile, recipe: Recipe, budget: Budget, context: int) -> Inspection:
    """The byte law for a profile at a budget and the memory of its statistics, with no model and no plan at hand."""
    bits = _nominal_bits(profile, recipe, budget)
    groups = _groups(profile, recipe)
    layout = recipe.choices.nominal_layout(profile.geometry, groups, bits).summary(context)
    geometry = profile.geometry
    held = stats_bytes(geometry)
    collect = {"rows": ROWS, "bytes_stats": held, "bytes_stats_layer": held // geometry.layers}
    data = {"profile": profile.name, "recipe": recipe.name, "bits": bits} | layout | {"collect": collect}
    facts = Table(
        f"profile {profile.name} ({profile.model})",
        ["fact", "value"],
        [
            ["layers", str(geometry.layers)],
            ["query heads / kv heads / head dim", f"{geometry.heads} / {geometry.kv_heads} / {geometry.head_dim}"],
            ["head groups", f"{profile.head_groups} ({profile.head_groups_why})"],
            [f"head groups of {recipe.name}", groups.described],
            ["bits per channel", f"{bits:.4g}"],
            ["collect: statistics in memory", f"{held / 1e9:.2f} GB beside the model, with {ROWS:,} rows a layer"],
            ["whiten: statistics in memory", f"{collect['bytes_stats_layer'] / 1e6:.1f} MB, of a layer at a time"],
        ],
    )
    return Inspection(data, [facts, layout_table(layout)])


def _groups(profile: ModelProfile, recipe: Recipe) -> HeadGroups:
    return recipe.head_groups(profile.geometry.kv_heads, HeadGroups.both(profile.head_groups))


def _nominal_bits(profile: ModelProfile, recipe: Recipe, budget: Budget) -> float:
    if budget.unit == "bits":
        return budget.value
    assert budget.context is not None
    groups = _groups(profile, recipe)
    if not recipe.packed:
        raise UsageError(
            f"what {recipe.name} comes to at a ratio or a size depends on the plan",
            "give --budget in bits, or plan and inspect the plan",
        )
    empty = recipe.choices.nominal_layout(profile.geometry, groups, 0.0)
    spare = allowed_bytes(budget, empty) - empty.bytes(budget.context)
    one = recipe.choices.nominal_layout(profile.geometry, groups, 1.0)
    return spare / (one.bytes(budget.context) - empty.bytes(budget.context))
