"""Codecs of a Plan with its Transform: one per layer and side, of the quantizers that code whole sites of latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from aatc_cli.artifacts.transform import SITE_TENSORS, Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.token_classes import RatedCodec
from aatc_cli.errors import AatcError
from aatc_cli.methods.recipe import PACKED_QUANTIZERS

if TYPE_CHECKING:
    from aatc_cli.artifacts.plan import Plan


def packed_codecs(plan: Plan, transform: Transform, device: str) -> list[dict[Side, TransformCodec]]:
    """One float32 codec per layer and side on ``device``.

    Raises `ArtifactError` on values no codec can have, `AatcError` for a method that has no packed form.
    """
    quantizer = plan.recipe.quantizer
    if quantizer not in PACKED_QUANTIZERS:
        raise AatcError(
            f"recipe {plan.recipe.name} has no packed cache: its quantizer {quantizer} is simulated only",
            "evaluate it with --task kl, perplexity or a benchmark; its size is in aatc inspect",
        )
    if plan.classes.count > 1:
        raise AatcError(
            f"{plan.name} keeps tokens at {plan.classes.count} rates, which the packed cache does not hold yet",
            "evaluate it with --task kl or perplexity, or plan with --recipe loss-aware",
        )
    if not plan.recipe.window.exact:
        raise AatcError(
            f"{plan.name} keeps its window in 8 bits, which the packed cache does not yet",
            "evaluate it with --task kl or perplexity, or plan with a window of 16 bits",
        )
    return _codecs_at(plan, transform, device, plan.bits)


def simulated_codecs(
    plan: Plan, transform: Transform, device: str
) -> list[dict[Side, TransformCodec]] | list[dict[Side, RatedCodec]]:
    """One codec per layer and side, with token classes one that holds those of all classes; raises `ArtifactError`."""
    # one transform serves all classes: only widths differ
    first = _codecs_at(plan, transform, device, plan.class_bits(0))
    if plan.classes.count == 1:
        return first
    of_classes = [
        [
            {side: codecs[side].with_bits(torch.tensor(widths[side]).to(device)) for side in SIDES}
            for codecs, widths in zip(first, plan.class_bits(k), strict=True)
        ]
        for k in range(plan.classes.count)
    ]
    return [
        {
            side: RatedCodec(
                tuple(of_class[layer][side] for of_class in of_classes), torch.from_numpy(thresholds.copy()).to(device)
            )
            for side in SIDES
        }
        for layer, thresholds in enumerate(plan.classes.thresholds)
    ]


def _codecs_at(
    plan: Plan, transform: Transform, device: str, bits: Sequence[Mapping[Side, list[int]]]
) -> list[dict[Side, TransformCodec]]:
    """One codec per layer and side at these widths [C]."""
    quantizer: Any = plan.recipe.quantizer
    codecs: list[dict[Side, TransformCodec]] = []
    channels = plan.geometry.channels
    for layer, widths in enumerate(bits):
        sites: dict[Side, TransformCodec] = {}
        for side in SIDES:
            groups = plan.groups.of(side)
            matrix: tuple[int, ...] = (groups, channels // groups, channels // groups)
            parts = {
                part: torch.from_numpy(
                    transform.site(layer, side, part, matrix if part in ("encode", "decode") else (channels,))
                )
                for part in SITE_TENSORS
            }
            if bool((parts["scale"] <= 0).any()):
                raise transform.artifact.damaged(f"layer {layer} {side} has a scale that is not positive")
            chosen = plan.recipe.key_weight if side == "k" else plan.recipe.value_weight
            codec = TransformCodec(
                parts["encode"],
                parts["decode"],
                parts["scale"],
                torch.tensor(widths[side]),
                parts["variance"],
                quantizer=quantizer,
                weight={"none": None, "fisher": parts["fisher"]}.get(chosen, parts["weight"]),
                scale_bits=plan.recipe.scale_bits,
            )
            sites[side] = codec.to(device)
        codecs.append(sites)
    return codecs
