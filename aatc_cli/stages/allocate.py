"""allocate: widths for every site and channel from a Transform; deterministic, checkable, many budgets at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import MAX_BITS, Budget, Geometry, HeadGroups, Window
from aatc_cli.console import say, working
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate import Allocation, Energies
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError, ArtifactError, UsageError
from aatc_cli.methods.allocators.one_width import width_of
from aatc_cli.methods.choices import Choices, MethodTables
from aatc_cli.methods.recipe import Recipe
from aatc_cli.stages.pressing import pressed_plan

# budgets given as a ratio or a size are met on a grid of 1/1024 bit per channel
_GRID = 1024
# of sums that floats leave a little above a whole number
_ROUNDING = 1e-9
# bits a number below its budget from which a plan is said to have run out of channels
_UNSPENT = 0.25


@dataclass(frozen=True)
class Difference:
    """Where a re-derived plan differs from the one checked."""

    layer: int
    side: str
    channel: int
    planned: int
    derived: int


@dataclass(frozen=True)
class Unmet:
    """A plan that no allocation gives, by its name, and why."""

    name: str
    error: AatcError


def allocate(
    run: Run,
    recipe: Recipe,
    budgets: list[Budget],
    *,
    transform: Path | None = None,
    force: bool = False,
    unmet: list[Unmet] | None = None,
) -> list[Plan]:
    """Make one Plan per budget from the run's Transform (or the one at ``transform``).

    Raises `SettingsMismatchError` when a plan exists with other settings, and `AatcError` when a budget cannot be met,
    unless those are gathered in ``unmet``.
    """
    if recipe.choices.allocator.nothing:
        remedy = f"evaluate it directly: aatc eval --recipe {recipe.name}"
        raise UsageError(f"recipe {recipe.name} allocates nothing", remedy)
    made_from = transform_for(recipe, transform or run.transform(recipe.transform_name))
    with run.lock():
        energies: Energies | None = None
        plans = []
        for budget in budgets:
            target = run.plan(recipe.name, budget)
            if Plan.exists(target, made_from, recipe, budget, force=force):
                say(f"allocate: inputs unchanged, nothing to do ({target})")
            else:
                energies = energies if energies is not None else made_from.energies()
                try:
                    with working(f"allocate: {recipe.name} {budget.label}"):
                        derived = derive(made_from, energies, recipe, budget)
                except AatcError as error:
                    if unmet is None:
                        raise
                    unmet.append(Unmet(f"{recipe.name} {budget.label}", error))
                    continue
                manifest = Plan.write(target, made_from, recipe, budget, *derived)
                say(f"allocate: {recipe.name} {budget.label} -> {target} ({manifest.digest[:12]})")
            plans.append(Plan.open(target))
            _say_unspent(plans[-1])
    return plans


def _say_unspent(plan: Plan) -> None:
    """Say of a plan whose channels all have the most bits that there are that it takes less than was asked for."""
    packed, asked = plan.layout.bits_packed, plan.budget
    if asked.unit == "bits" and packed < asked.value - _UNSPENT:
        say(f"allocate: {plan.name} has no channel left to give bits to: {packed:.3f} of {asked.label} are spent")


def transform_for(recipe: Recipe, place: Path) -> Transform:
    """The Transform at ``place``, of the kind, the head groups and the tables that the recipe asks for."""
    command = _whiten_command(recipe)
    if not place.exists():
        raise ArtifactError(f"there is no transform at {place}", f"run {command} to make it")
    transform = Transform.open(place)
    kind, found = transform.settings.transform, transform.head_groups
    if kind != recipe.transform:
        raise UsageError(f"recipe {recipe.name} needs a {recipe.transform} transform, not {kind}", f"run {command}")
    for name in recipe.choices.tables:
        if name not in transform.settings.tables:
            raise UsageError(f"recipe {recipe.name} needs the tables of {name}, which {place} lacks", f"run {command}")
    if transform.settings.prediction != recipe.choices.prediction.coding(recipe):
        raise UsageError(f"the maps of {place} are not those that recipe {recipe.name} predicts by", f"run {command}")
    if recipe.head_groups(transform.geometry.kv_heads, found) != found:
        problem = f"recipe {recipe.name} needs other head groups than the {found.described} of {place}"
        raise UsageError(problem, f"run {command}")
    return transform


def _whiten_command(recipe: Recipe) -> str:
    if recipe.choices.tables or recipe.choices.prediction.predicts:
        return f"aatc whiten --recipe {recipe.name}"
    options = (
        ("transform", recipe.transform, "whiten"),
        ("key-groups", recipe.key_groups, "profile"),
        ("value-groups", recipe.value_groups, "profile"),
    )
    return " ".join(["aatc whiten", *(f"--{name} {value}" for name, value, usual in options if value != usual)])


def check(plan: Plan, transform: Path | None = None) -> list[Difference]:
    """Re-derive a plan from its transform and its own settings; the widths that differ, none when identical."""
    made_from = plan.transform(transform)
    derived, layout, _ = derive(made_from, made_from.energies(), plan.recipe, plan.budget)
    differences = [
        Difference(layer, side, channel, planned, int(derived.bits[layer][side].flat[channel]))
        for layer, widths in enumerate(plan.bits)
        for side in SIDES
        for channel, planned in enumerate(widths[side])
        if planned != int(derived.bits[layer][side].flat[channel])
    ]
    if layout.keep != plan.keep:
        raise plan.artifact.damaged(f"the share of tokens that stay is {plan.keep}, and not {layout.keep}")
    return differences


def derive(
    transform: Transform, energies: Energies, recipe: Recipe, budget: Budget
) -> tuple[Allocation, CacheLayout, float]:
    """The allocation for a budget, its byte law, and the bits per channel the budget came to."""
    planner = Planner.of(transform, energies, recipe)
    if recipe.pressed:
        guess = round(_GRID * budget.value / min(recipe.keep or 1.0, 1.0)) if budget.unit == "bits" else None
        return pressed_plan(recipe, planner.allocation, planner.layout, planner.fits(budget), guess)
    if budget.unit == "bits":
        _require_width(recipe, budget.value)
        fixed = planner.allocation(budget.value)
        return fixed, planner.layout(fixed), budget.value
    assert budget.context is not None
    allowed = allowed_bytes(budget, planner.nominal(0.0))
    low, high = 1, min(recipe.max_bits, MAX_BITS) * _GRID
    best: tuple[Allocation, CacheLayout, float] | None = None
    while low <= high:
        middle = (low + high) // 2
        try:
            allocation = planner.allocation(middle / _GRID)
        except AatcError:
            low = middle + 1  # too few bits for the protected layers, or for any width: the search goes on above
            continue
        layout = planner.layout(allocation)
        if layout.bytes(budget.context) <= allowed:
            best, low = (allocation, layout, middle / _GRID), middle + 1
        else:
            high = middle - 1
    if best is None:
        raise _too_small(budget, allowed, recipe.window)
    return best


@dataclass(frozen=True)
class Planner:
    """Allocations of one recipe from one Transform; what is read of it serves all budgets."""

    choices: Choices
    geometry: Geometry
    groups: HeadGroups
    energies: Energies
    tables: MethodTables

    @classmethod
    def of(cls, transform: Transform, energies: Energies, recipe: Recipe) -> Planner:
        """Raises `ArtifactError` where the Transform lacks what the recipe reads."""
        geometry, groups = transform.geometry, transform.head_groups
        choices = _for_compressed_layers(recipe, geometry).choices
        choices.require_blocks(geometry.channels, groups)
        tables = transform.tables(choices)
        return cls(choices, geometry, groups, energies, tables)

    def allocation(self, bits: float) -> Allocation:
        """Widths at an average of ``bits``; raises `AatcError` when they cannot be had."""
        return self.choices.allocate(self.energies, bits, self.groups, self.tables)

    def fits(self, budget: Budget) -> Callable[[CacheLayout], bool]:
        """Whether all that is packed is within the budget: bits of a number of the text, or bytes at its context."""
        if budget.unit == "bits":
            return lambda law: law.bits_packed <= budget.value + _ROUNDING
        assert budget.context is not None
        tokens, allowed = budget.context, allowed_bytes(budget, self.nominal(0.0))
        return lambda law: law.bytes(tokens) <= allowed

    def nominal(self, bits: float) -> CacheLayout:
        """The byte law at an average width."""
        return self.choices.nominal_layout(self.geometry, self.groups, bits)

    def layout(self, allocation: Allocation, keep: float = 1.0) -> CacheLayout:
        """The byte law of an allocation; keep: share of the tokens that a press leaves."""
        bits: list[dict[Side, Any]] = [{side: layer[side].tolist() for side in SIDES} for layer in allocation.bits]
        if allocation.classes is None:
            blocks = sum(int(layer[side].sum()) for layer in allocation.starts or () for side in SIDES)
            return self.choices.layout(self.geometry, self.groups, [bits], blocks, keep)
        by_class = [
            [{side: layer[side][k] for side in SIDES} for layer in bits] for k in range(allocation.classes.count)
        ]
        return self.choices.layout(self.geometry, self.groups, by_class, 0, keep)


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


def _require_width(recipe: Recipe, bits: float) -> None:
    """Raise `UsageError` for a budget that a recipe of one width would leave partly unused."""
    if recipe.choices.allocator.one_width and width_of(recipe, bits) != bits:
        widths = ", ".join(str(width) for width in recipe.allowed_widths if width)
        raise UsageError(
            f"recipe {recipe.name} gives every channel one width, which {bits:g} bits is not",
            f"use --budget with one of {widths}",
        )
