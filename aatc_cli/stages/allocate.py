"""allocate: widths for every site and channel from a Transform; deterministic, checkable, many budgets at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import MAX_BITS, Budget, Geometry, HeadGroups, Window
from aatc_cli.console import say
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Energies, require_blocks
from aatc_cli.core.allocate_methods import MethodTables, allocate_any, width_of
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.token_layout import TokenLayout
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.method_tables import load_tables

# budgets given as a ratio or a size are met on a grid of 1/1024 bit per channel
_GRID = 1024


@dataclass(frozen=True)
class Difference:
    """Where a re-derived plan differs from the one checked."""

    layer: int
    side: str
    channel: int
    planned: int
    derived: int


def allocate(
    run: Run, recipe: Recipe, budgets: list[Budget], *, transform: Path | None = None, force: bool = False
) -> list[Plan]:
    """Make one Plan per budget from the run's Transform (or the one at ``transform``).

    Raises `AatcError` when a budget cannot be met, `SettingsMismatchError` when a plan exists with other settings.
    """
    if recipe.allocator == "none":
        remedy = f"evaluate it directly: aatc eval --recipe {recipe.name}"
        raise UsageError(f"recipe {recipe.name} allocates nothing", remedy)
    made_from = _transform_for(recipe, transform or run.transform(recipe.transform_name))
    with run.lock():
        energies: Energies | None = None
        plans = []
        for budget in budgets:
            target = run.plan(recipe.name, budget)
            if Plan.exists(target, made_from, recipe, budget, force=force):
                say(f"allocate: inputs unchanged, nothing to do ({target})")
            else:
                energies = energies if energies is not None else made_from.energies()
                derived = derive(made_from, energies, recipe, budget)
                manifest = Plan.write(target, made_from, recipe, budget, *derived)
                say(f"allocate: {recipe.name} {budget.label} -> {target} ({manifest.digest[:12]})")
            plans.append(Plan.open(target))
    return plans


def _transform_for(recipe: Recipe, place: Path) -> Transform:
    """The Transform at ``place``, of the kind and the head groups that the recipe asks for."""
    command = _whiten_command(recipe)
    if not place.exists():
        raise ArtifactError(f"there is no transform at {place}", f"run {command} to make it")
    transform = Transform.open(place)
    kind, found = transform.settings.transform, transform.head_groups
    if kind != recipe.transform:
        raise UsageError(f"recipe {recipe.name} needs a {recipe.transform} transform, not {kind}", f"run {command}")
    if recipe.head_groups(transform.geometry.kv_heads, found) != found:
        problem = f"recipe {recipe.name} needs other head groups than the {found.described} of {place}"
        raise UsageError(problem, f"run {command}")
    return transform


def _whiten_command(recipe: Recipe) -> str:
    options = (
        ("transform", recipe.transform, "whiten"),
        ("key-groups", recipe.key_groups, "profile"),
        ("value-groups", recipe.value_groups, "profile"),
    )
    return " ".join(["aatc whiten", *(f"--{name} {value}" for name, value, usual in options if value != usual)])


def check(plan: Plan, transform: Path | None = None) -> list[Difference]:
    """Re-derive a plan from its transform and its own settings; the widths that differ, none when identical."""
    made_from = plan.transform(transform)
    derived, _, _ = derive(made_from, made_from.energies(), plan.recipe, plan.budget)
    differences = [
        Difference(layer, side, channel, planned, int(derived.bits[layer][side].flat[channel]))
        for layer, widths in enumerate(plan.bits)
        for side in SIDES
        for channel, planned in enumerate(widths[side])
        if planned != int(derived.bits[layer][side].flat[channel])
    ]
    if plan.recipe.tokens is not None:
        plan.classes.require(plan.artifact, made_from.classes(plan.recipe))
    return differences


def derive(
    transform: Transform, energies: Energies, recipe: Recipe, budget: Budget
) -> tuple[Allocation, CacheLayout, float]:
    """The allocation for a budget, its byte law, and the bits per channel the budget came to."""
    geometry, groups = transform.geometry, transform.head_groups
    recipe = _for_compressed_layers(recipe, geometry)
    require_blocks(recipe, geometry.channels, groups)

    tables = load_tables(transform, recipe)

    def layout_of(allocation: Allocation) -> CacheLayout:
        return TokenLayout.of_plan(recipe, geometry, groups, *_streams(allocation))

    if budget.unit == "bits":
        _require_width(recipe, budget.value)
        fixed = allocate_any(energies, recipe, budget.value, groups, tables)
        return fixed, layout_of(fixed), budget.value
    assert budget.context is not None
    allowed = allowed_bytes(budget, CacheLayout.nominal_of_recipe(recipe, geometry, groups, 0.0))
    low, high = 1, min(recipe.max_bits, MAX_BITS) * _GRID
    best: tuple[Allocation, CacheLayout, float] | None = None
    while low <= high:
        middle = (low + high) // 2
        allocation = _allocation_or_none(energies, recipe, middle / _GRID, groups, tables)
        layout = layout_of(allocation) if allocation is not None else None
        if allocation is None or layout is None or layout.bytes(budget.context) <= allowed:
            best = (allocation, layout, middle / _GRID) if allocation is not None and layout is not None else best
            low = middle + 1
        else:
            high = middle - 1
    if best is None:
        raise _too_small(budget, allowed, recipe.window)
    return best


def _streams(allocation: Allocation) -> tuple[list[list[dict[Side, list[int]]]], list[list[float]], int]:
    """Widths of an allocation by class, layer and side, shares of the classes by layer, and blocks of one precision."""
    bits: list[dict[Side, list[int]]] = [{side: layer[side].tolist() for side in SIDES} for layer in allocation.bits]
    blocks = sum(int(layer[side].sum()) for layer in allocation.starts or () for side in SIDES)
    if allocation.classes is None:
        return [bits], [[1.0] for _ in bits], blocks
    by_class: list[list[dict[Side, list[int]]]] = [
        [{side: layer[side][k] for side in SIDES} for layer in bits]  # type: ignore[misc]
        for k in range(allocation.classes.counts.shape[1])
    ]
    return by_class, allocation.classes.shares.tolist(), blocks


def allowed_bytes(budget: Budget, empty: CacheLayout) -> int:
    """Cache bytes a ratio or size budget allows; raises `AatcError` when sinks, window and scales exceed it already."""
    assert budget.context is not None
    reference = empty.reference_bytes(budget.context)
    allowed = int(reference / budget.value) if budget.unit == "ratio" else int(budget.value)
    fixed = empty.bytes(budget.context)
    if allowed <= fixed:
        raise AatcError(
            f"{allowed:,} bytes at {budget.context} tokens are not more than the {fixed:,} bytes "
            "that sinks, window and token scales take alone",
            f"allow more bytes, use a longer --context, or a ratio below {reference / fixed:.2f}",
        )
    return allowed


def _too_small(budget: Budget, allowed: int, window: Window) -> AatcError:
    return AatcError(
        f"no allocation fits {allowed:,} bytes at {budget.context} tokens with a window of {window.recent}",
        "allow more bytes, or use a recipe with fewer protected layers",
    )


def _for_compressed_layers(recipe: Recipe, geometry: Geometry) -> Recipe:
    """The recipe with the protected layers that are compressed at all: the model's first ones may be sliding layers."""
    layers = geometry.leading(recipe.protect.layers)
    return recipe.model_copy(update={"protect": recipe.protect.model_copy(update={"layers": layers})})


def _allocation_or_none(
    energies: Energies, recipe: Recipe, bits: float, groups: HeadGroups, tables: MethodTables
) -> Allocation | None:
    try:
        return allocate_any(energies, recipe, bits, groups, tables)
    except AatcError:
        return None  # too few bits for the protected layers, or for any width: the search goes on above


def _require_width(recipe: Recipe, bits: float) -> None:
    """Raise `UsageError` for a budget that a recipe of one width would leave partly unused."""
    if recipe.allocator == "one-width" and width_of(recipe, bits) != bits:
        widths = ", ".join(str(width) for width in recipe.allowed_widths if width)
        raise UsageError(
            f"recipe {recipe.name} gives every channel one width, which {bits:g} bits is not",
            f"use --budget with one of {widths}",
        )
