"""What published methods need of Stats beside a transform's matrices, and how it lies in a Transform."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.core.allocate_methods import MethodTables
from aatc_cli.core.head_rates import WIDEST, head_errors
from aatc_cli.core.joint import principal_components
from aatc_cli.core.precision_blocks import GRID, SIZES, WIDTHS, block_errors
from aatc_cli.core.signposts import normalized, outlier_count, place_signposts, token_ranges
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.transform import encode as encode_latents
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.methods.recipe import Recipe

# widths for which signposts are placed, and the share of values that KVQuant leaves to its sparse part
SIGNPOST_WIDTHS = (1, 2, 3, 4)
OUTLIERS = 0.01
# latents over all layers: as many as rows can tell apart, and no more than a basis of bearable size
JOINT_LATENTS = 4096
# every fourth row is kept out of the joint basis and measures what its latents cost
_HELD_OUT = 4


def site_tables(transform: str, side: Side, stats: LayerStats, encode: Tensor) -> dict[str, Tensor]:
    """Tensors of one site by name, for the transforms that have any. encode [groups, E, E]."""
    rows = (stats.k_rows if side == "k" else stats.v_rows)[: stats.filled]
    if transform == "hadamard" and encode.shape[0] == stats.q_outer.shape[0]:
        return {"head_error": head_errors(encode_latents(rows.to(torch.float64), encode), int(encode.shape[0]))}
    if transform == "pca":
        mean = site_mean(side, stats)
        latents = encode_latents(rows.to(torch.float64) - mean, encode)
        return {"mean": mean, "block_error": _block_table(latents)}
    return _signposts(side, stats, rows) if transform == "codebook" else {}


def site_mean(side: Side, stats: LayerStats) -> Tensor:
    """Mean vector of a site. [C]."""
    return (stats.k_sum if side == "k" else stats.v_sum) / stats.count


def _block_table(latents: Tensor) -> Tensor:
    if latents.shape[1] % GRID:
        raise AatcError(
            f"blocks of {GRID} latents do not fill a site of {latents.shape[1]} channels",
            "use another recipe for this model",
        )
    return block_errors(latents)


def _signposts(side: Side, stats: LayerStats, rows: Tensor) -> dict[str, Tensor]:
    """Ranges of the key channels, and the points of every width, weighted by squared loss gradients."""
    weights = _row_weights(side, stats, rows)
    wide = rows.to(torch.float64)
    found: dict[str, Tensor] = {}
    if side == "k":
        low, high = torch.quantile(wide, torch.tensor([OUTLIERS / 2, 1 - OUTLIERS / 2], dtype=torch.float64), dim=0)
        found |= {"low": low, "high": high}
        unit = normalized(wide, (high + low) / 2, (high - low) / 2)
        kept = unit.abs() <= 1
    else:
        centre, half, exact = token_ranges(wide, outlier_count(OUTLIERS, wide.shape[1]))
        unit, kept = normalized(wide, centre, half), ~exact
    values, pulls = unit[kept].numpy(), weights.expand_as(unit)[kept].numpy()
    for bits in SIGNPOST_WIDTHS:
        found[f"points_{bits}"] = torch.from_numpy(place_signposts(values, pulls, bits))
    return found


def _row_weights(side: Side, stats: LayerStats, rows: Tensor) -> Tensor:
    """Squared loss gradients of the sampled rows [R, C], or their mean over tokens [1, C]."""
    mean = (stats.k_fisher if side == "k" else stats.v_fisher).diagonal()
    if not bool(mean.any()):
        raise ArtifactError(
            "the codebook transform weighs by loss gradients, and these Stats hold none",
            "collect with --fisher N (64 windows or more serve well), into the same run with --force",
        )
    return mean.clamp_min(0)[None] / mean.max()


def joint_tables(layers: list[LayerStats], side: Side) -> dict[str, Tensor]:
    """The transform over all layers of one side: mean and basis, energy [q] of its latents and errors of their blocks.

    The basis comes from three of four sampled rows, energy and errors from the fourth, as the original measures on
    tokens that it holds out.
    """
    mean = torch.cat([site_mean(side, stats) for stats in layers])
    rows = torch.cat([(s.k_rows if side == "k" else s.v_rows)[: s.filled] for s in layers], 1).to(torch.float64) - mean
    held = torch.arange(rows.shape[0]) % _HELD_OUT == _HELD_OUT - 1
    basis = principal_components(rows[~held], JOINT_LATENTS)
    if basis.shape[1] == 0:
        raise ArtifactError("too few sampled rows for a transform over all layers", "collect with more --rows")
    latents = rows[held] @ basis
    return {
        "mean": mean,
        "basis": basis.to(torch.float32),
        "energy": latents.square().mean(0),
        "block_error": block_errors(latents),
    }


def load_tables(transform: Transform, recipe: Recipe) -> MethodTables:
    """The tables that the recipe's allocator needs; raises `ArtifactError` when they are not what they must be."""
    geometry = transform.geometry
    if recipe.tokens is not None:
        return MethodTables(classes=transform.classes(recipe))
    if recipe.allocator not in ("per-head", "block-dp"):
        return MethodTables()
    if recipe.transform == "global":
        joint: dict[Side, tuple[np.ndarray, np.ndarray]] = {}
        for side in SIDES:
            energy = transform.artifact.array(f"joint.{side}.energy")
            joint[side] = energy, transform.artifact.array(f"joint.{side}.block_error")
            if energy.ndim != 1 or joint[side][1].shape != (energy.size // GRID, len(SIZES), len(WIDTHS)):
                raise transform.artifact.damaged(f"its joint tables of {side} do not fit together")
        return MethodTables(joint=joint)
    per_head = recipe.allocator == "per-head"
    name = "head_error" if per_head else "block_error"
    shape = (geometry.kv_heads, WIDEST + 1) if per_head else (geometry.channels // GRID, len(SIZES), len(WIDTHS))
    return MethodTables(sites=[dict(_site_arrays(transform, layer, name, shape)) for layer in range(geometry.layers)])


def _site_arrays(
    transform: Transform, layer: int, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[Side, np.ndarray]]:
    for side in SIDES:
        table = transform.artifact.array(f"layers.{layer}.{side}.{name}")
        if table.shape != shape or not np.issubdtype(table.dtype, np.floating):
            raise transform.artifact.damaged(f"tensor layers.{layer}.{side}.{name} is not of shape {shape}")
        yield side, table.astype(np.float64)
