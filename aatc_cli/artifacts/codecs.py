"""Codecs of what a Plan says, with its Transform: one per layer and side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aatc_cli.artifacts.brought import brought
from aatc_cli.core import SIDES, Side
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import Recipe
from aatc_cli.methods.sites import Sites


def require_packed(name: str, recipe: Recipe) -> None:
    """Raise `AatcError` where the packed cache does not hold the plan ``name`` of this recipe."""
    if recipe.choices.prediction.predicts:
        raise AatcError(
            f"{name} keeps what layers below do not tell, which is read layer by layer: no live cache holds it",
            "evaluate it with aatc eval kl or perplexity; plan with --recipe loss-aware-tiles for a live cache",
        )
    if recipe.pressed:
        raise AatcError(
            f"recipe {recipe.name} has no packed cache: its press leaves other tokens in every kv head",
            "evaluate it with aatc eval kl or perplexity, or ruler --mode forced; its size is in aatc inspect",
        )
    if not recipe.packed:
        raise AatcError(
            f"recipe {recipe.name} has no packed cache: its quantizer {recipe.quantizer} is simulated only",
            "evaluate it with aatc eval kl, perplexity or a benchmark; its size is in aatc inspect",
        )
    if not recipe.window.exact:
        raise AatcError(
            f"{name} keeps its window in 8 bits, which the packed cache does not yet",
            "evaluate it with aatc eval kl or perplexity, or plan with a window of 16 bits",
        )


def codecs_of(
    recipe: Recipe, sites: Sites, widths: Sequence[Sequence[Mapping[Side, Sequence[int]]]], device: str
) -> list[dict[Side, Any]]:
    """One float32 codec per layer and side on ``device``, with token classes one that holds those of all classes.

    sites: of the first class; widths: of every class, by layer and side [C]. Raises `ArtifactError` on values no codec
    can have.
    """
    kind = recipe.choices.classes
    if not kind.tiled:
        return recipe.choices.codecs(sites, device)
    # one transform serves all classes: only widths differ
    first = recipe.choices.codecs(sites, "cpu")

    def coded(layer: int, side: Side) -> Any:
        return kind.codec(recipe, first[layer][side], torch.tensor([of_class[layer][side] for of_class in widths]))

    pairs = brought([{side: coded(layer, side) for side in SIDES} for layer in range(len(first))], device)
    return recipe.choices.prediction.layers(recipe, sites.tensors, sites.geometry, pairs)
