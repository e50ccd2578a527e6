"""Codecs of a Plan with its Transform: one per layer and side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.errors import AatcError
from aatc_cli.methods.sites import Library, Sites

if TYPE_CHECKING:
    from aatc_cli.artifacts.plan import Plan


def packed_codecs(plan: Plan, transform: Transform, device: str) -> list[dict[Side, Any]]:
    """One float32 codec per layer and side on ``device``.

    Raises `ArtifactError` on values no codec can have, `AatcError` for a method that has no packed form.
    """
    if not plan.recipe.packed:
        raise AatcError(
            f"recipe {plan.recipe.name} has no packed cache: its quantizer {plan.recipe.quantizer} is simulated only",
            "evaluate it with --task kl, perplexity or a benchmark; its size is in aatc inspect",
        )
    kind = plan.recipe.choices.classes
    if plan.classes.count > 1 and not kind.tiled:
        raise AatcError(
            f"{plan.name} keeps tokens at {plan.classes.count} rates, which the packed cache does not hold yet",
            "evaluate it with --task kl or perplexity, or plan with --recipe loss-aware",
        )
    if not plan.recipe.window.exact:
        raise AatcError(
            f"{plan.name} keeps its window in 8 bits, which the packed cache does not yet",
            "evaluate it with --task kl or perplexity, or plan with a window of 16 bits",
        )
    return simulated_codecs(plan, transform, device)


def simulated_codecs(
    plan: Plan, transform: Transform, device: str, library: Library | None = None
) -> list[dict[Side, Any]]:
    """One codec per layer and side, with token classes one that holds those of all classes.

    library: makes codecs of other packages. Raises `ArtifactError` on values no codec can have.
    """
    sites = Sites(transform.artifact, plan.geometry, plan.groups, plan.class_bits(0), plan.starts, library)
    # one transform serves all classes: only widths differ
    first = plan.recipe.choices.codecs(sites, device)
    kind, classes = plan.recipe.choices.classes, plan.classes
    if classes.count == 1 and not kind.tiled:
        return first

    def coded(layer: int, side: Side) -> Any:
        bits = torch.tensor([plan.class_bits(k)[layer][side] for k in range(classes.count)]).to(device)
        thresholds = torch.from_numpy(classes.thresholds[layer].copy()).to(device)
        return kind.codec(plan.recipe, first[layer][side], bits, thresholds)

    return [{side: coded(layer, side) for side in SIDES} for layer in range(plan.geometry.layers)]
