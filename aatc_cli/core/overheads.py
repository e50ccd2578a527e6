"""What each published method keeps beside its codes, counted by cause: scales, minima, norms, outliers, tables.

A part of the byte law (`core.layout`), which adds these to codes, sinks and window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core import SIDES, Side
from aatc_cli.core.ranks import rounded_rank
from aatc_cli.core.signposts import outlier_count
from aatc_cli.methods.recipe import Recipe

HALF = 2  # bytes of a float16 scale, minimum, norm or outlier
INDEX = 4  # bytes of an outlier's place, as the original's sparse matrices have it
QUANTO_GROUP = 64

Widths = Sequence[Mapping[Side, Sequence[int]]]


@dataclass(frozen=True)
class Overheads:
    """Bytes beside codes, sinks and window, over all layers, in place of token scales and matrices.

    live: of one flush block of packed tokens, by cause. static: once, by cause.
    """

    live: Mapping[str, int]
    static: Mapping[str, int] = field(default_factory=dict)


def method_overheads(
    recipe: Recipe, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int = 0
) -> Overheads | None:
    """The overheads of a recipe at these widths; None for the packed codecs, whose bytes the layout knows itself.

    blocks: blocks of one precision over all sites, for the quantizer "block-max".
    """
    flush = recipe.window.flush
    if recipe.quantizer == "grouped-minmax":
        live: dict[str, int] = {}
        for side, name in zip(SIDES, ("key", "value"), strict=True):
            pairs = flush * sum(_grouped_pairs(recipe, geometry, groups, layer[side], side) for layer in bits)
            live |= {f"{name}_scales": round(pairs * HALF), f"{name}_minima": round(pairs * HALF)}
        return Overheads(live, _matrices(recipe, groups, geometry, bits))
    if recipe.quantizer == "lloyd-norm":
        coded = sum(width > 0 for layer in bits for side in SIDES for width in layer[side])
        norms = flush * HALF * coded // geometry.head_dim
        return Overheads({"norms": norms}, _matrices(recipe, groups, geometry, bits))
    if recipe.quantizer == "nonuniform-outlier":
        return _signpost_overheads(recipe, geometry, bits)
    if recipe.quantizer == "block-max":
        active = sum(width > 0 for layer in bits for side in SIDES for width in layer[side])
        span = geometry.channels * (geometry.layers if recipe.transform == "global" else 1)
        static = {"decode_matrices": active * span * HALF, "means": 2 * geometry.layers * geometry.channels * HALF}
        return Overheads({"block_scales": flush * blocks * HALF}, static)
    if recipe.quantizer in ("quanto", "hqq"):
        pairs = flush * 2 * geometry.layers * geometry.channels // QUANTO_GROUP
        return Overheads({"scales": pairs * HALF, "zero_points": pairs * HALF})
    return Overheads({}) if recipe.quantizer == "float8" else None


def nominal_widths(recipe: Recipe, geometry: Geometry, groups: HeadGroups, bits: float) -> list[dict[Side, list[int]]]:
    """Widths [C] per layer and side that a recipe gives at ``bits`` per channel where nothing is known of a model."""
    layer: dict[Side, list[int]] = {}
    for side in SIDES:
        count = groups.of(side)
        size = geometry.channels // count
        if recipe.allocator == "rank":
            whole = round(bits / recipe.max_bits * geometry.channels)
            rank = rounded_rank(whole, count, size, recipe.coding.rank_multiple) if whole else 0
            layer[side] = ([recipe.max_bits] * rank + [0] * (size - rank)) * count
        else:
            layer[side] = [int(bits) if recipe.allocator == "one-width" else int(bits > 0)] * geometry.channels
    return [layer] * geometry.layers


def group_size(recipe: Recipe, geometry: Geometry) -> int:
    """Members of a group of the quantizer "grouped-minmax": the recipe's number, or a head's channels."""
    return recipe.coding.group or geometry.head_dim


def _grouped_pairs(recipe: Recipe, geometry: Geometry, groups: HeadGroups, widths: Sequence[int], side: Side) -> float:
    """Pairs of scale and minimum per packed token of one site."""
    coded = sum(width > 0 for width in widths)
    if recipe.allocator == "rank":
        return groups.of(side) if coded else 0
    return coded / group_size(recipe, geometry)


def _matrices(recipe: Recipe, groups: HeadGroups, geometry: Geometry, bits: Widths) -> dict[str, int]:
    """Decode rows of coded channels in float16; nothing for maps that have no numbers of their own."""
    if recipe.transform in ("identity", "hadamard"):
        return {}
    counts = {side: sum(width > 0 for layer in bits for width in layer[side]) for side in SIDES}
    size = sum(counts[side] * (geometry.channels // groups.of(side)) for side in SIDES)
    return {"decode_matrices": size * HALF}


def _signpost_overheads(recipe: Recipe, geometry: Geometry, bits: Widths) -> Overheads:
    flush, share = recipe.window.flush, recipe.coding.outliers
    kept = outlier_count(share, flush * geometry.channels) + flush * outlier_count(share, geometry.channels)
    points = sum(2 ** max(layer[side]) for layer in bits for side in SIDES)
    return Overheads(
        {"outliers": geometry.layers * kept * (HALF + INDEX), "value_ranges": flush * geometry.layers * 2 * HALF},
        {"signposts": points * HALF, "key_ranges": geometry.layers * geometry.channels * 2 * HALF},
    )
