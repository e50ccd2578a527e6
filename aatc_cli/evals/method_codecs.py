"""Codecs of the published methods from a Plan and its Transform, one per layer and side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.transform import Transform
from aatc_cli.core import SIDES, Side
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.joint import JointCodec
from aatc_cli.core.linear import LinearCodec, truncated
from aatc_cli.core.overheads import group_size
from aatc_cli.core.plain import Float8Codec, NormedLloyd
from aatc_cli.core.precision_blocks import BlockCodec, blocks_of
from aatc_cli.core.signposts import SignpostCodec
from aatc_cli.models.quantized import QuantizedCacheCodec

# maps that are the identity: nothing to multiply by
_NO_MAP = ("identity", "codebook")


def method_codecs(plan: Plan, transform: Transform, device: str) -> list[dict[Side, Any]]:
    """One codec per layer and side on ``device``; of a plan over all layers together the same one for every layer.

    Raises `ArtifactError` on values that no codec can have, `AatcError` for a package that is missing.
    """
    if plan.recipe.transform == "global":
        joint = {side: _joint(plan, transform, side).to(device) for side in SIDES}
        return [dict(joint) for _ in range(plan.geometry.layers)]
    return [
        {side: _site(plan, transform, layer, side).to(device) for side in SIDES}
        for layer in range(plan.geometry.layers)
    ]


def _site(plan: Plan, transform: Transform, layer: int, side: Side) -> Any:
    recipe, widths = plan.recipe, plan.bits[layer][side]
    if recipe.transform in _NO_MAP:
        return _quantizer(plan, transform, layer, side, widths)
    groups, channels = plan.groups.of(side), plan.geometry.channels
    shape = (groups, channels // groups, channels // groups)
    name = f"layers.{layer}.{side}"
    encode, decode = (transform.artifact.tensor(f"{name}.{part}", shape) for part in ("encode", "decode"))
    if recipe.allocator == "rank":
        kept = sum(width > 0 for width in widths) // groups
        encode, decode = truncated(encode, decode, kept, rotate=recipe.coding.latent_hadamard)
        inner: Any = GroupedMinMax(torch.full((groups * kept,), recipe.max_bits), kept)
        return LinearCodec(encode, decode, inner)
    if recipe.quantizer == "block-max":
        assert plan.starts is not None
        mean = transform.artifact.tensor(f"{name}.mean", (channels,))
        blocks = blocks_of(widths, plan.starts[layer][side])
        return LinearCodec(encode, decode, BlockCodec(blocks), mean)
    return LinearCodec(encode, decode, _quantizer(plan, transform, layer, side, widths))


def _quantizer(plan: Plan, transform: Transform, layer: int, side: Side, widths: list[int]) -> Any:
    recipe, geometry = plan.recipe, plan.geometry
    coding, bits = recipe.coding, max(widths)
    if recipe.quantizer == "grouped-minmax":
        keys = side == "k"
        return GroupedMinMax(
            torch.tensor(widths),
            group_size(recipe, geometry),
            coding.key_axis if keys else coding.value_axis,
            coding.key_clip if keys else coding.value_clip,
        )
    if recipe.quantizer == "lloyd-norm":
        return NormedLloyd(bits, geometry.head_dim)
    if recipe.quantizer == "nonuniform-outlier":
        return _signposts(plan, transform, layer, side, bits)
    if recipe.quantizer == "float8":
        return Float8Codec()
    assert recipe.quantizer in ("quanto", "hqq")
    return QuantizedCacheCodec.of(recipe.quantizer, bits, geometry.kv_heads, recipe.window.flush)


def _signposts(plan: Plan, transform: Transform, layer: int, side: Side, bits: int) -> SignpostCodec:
    name, channels = f"layers.{layer}.{side}", plan.geometry.channels
    points = transform.artifact.tensor(f"{name}.points_{bits}", (2**bits,)).to(torch.float32)
    share = plan.recipe.coding.outliers
    if side == "v":
        return SignpostCodec(points, share)
    low, high = (transform.artifact.tensor(f"{name}.{part}", (channels,)) for part in ("low", "high"))
    if bool((low > high).any()):
        raise transform.artifact.damaged(f"layer {layer} has a range of keys that ends before it begins")
    ranges = low.to(torch.float32), high.to(torch.float32)
    return SignpostCodec(points, share, *ranges, block=plan.recipe.window.flush)


def _joint(plan: Plan, transform: Transform, side: Side) -> JointCodec:
    assert plan.starts is not None
    whole = plan.geometry.layers * plan.geometry.channels
    widths = [width for layer in plan.bits for width in layer[side]]
    begins = [begin for layer in plan.starts for begin in layer[side]]
    blocks = blocks_of(widths, begins)
    coded = sum(block.size for block in blocks)
    basis: Tensor = transform.artifact.tensor(f"joint.{side}.basis", (whole, -1))
    if basis.shape[1] < coded:
        raise transform.artifact.damaged(f"its joint basis of {side} has fewer latents than the plan codes")
    mean = transform.artifact.tensor(f"joint.{side}.mean", (whole,))
    return JointCodec(basis[:, :coded].contiguous(), mean, BlockCodec(blocks))
