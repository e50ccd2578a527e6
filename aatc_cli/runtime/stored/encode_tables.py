"""What encoders outside of torch look up: matrices into units of levels, magnitudes, prices, and places of digits.

A latent in units of its channel is compared with the levels of its width, which lie evenly about zero: their positive
half, the *magnitudes*, and the *edges* between neighbours of them say all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.lloyd_levels import LLOYD_BITS, levels, uniform_step
from aatc_cli.core.tile_bytes import DIGITS
from aatc_cli.core.tile_packing import SidePacking, TilePacking
from aatc_cli.errors import AatcError
from aatc_cli.runtime.tiles.layer import TileLayer

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

# codes are kept in bytes
_WIDEST = 8


@dataclass(frozen=True)
class ClassCodes:
    """One class of one side of all layers. widths, prices [L, groups, E]: bits of a channel, price of a squared error.

    Planes of two bits before those of one: channel (-1 of none) and shift [L, groups, P, 16] of their digits, at
    [L, groups, P]: byte of a tile; planes [L, groups, 2]: of two bits, and all. scale_at [L, groups]: -1 without bits.
    """

    first: int
    quota: int
    widths: Ints
    prices: Floats
    channel: Ints
    shift: Ints
    at: Ints
    planes: Ints
    scale_at: Ints


@dataclass(frozen=True)
class SideCodes:
    """One side of all layers. matrix [L, groups, size, size] makes units, of which offset [L, groups, size] is taken.

    starts [widest + 1]: where the magnitudes of a width begin in ``sizes``, and in ``edges`` what lies above each.
    """

    groups: int
    size: int
    matrix: Tensor
    offset: Tensor
    sizes: Floats
    edges: Floats
    starts: Ints
    scale_bits: int
    classes: list[ClassCodes]

    @classmethod
    def of(cls, layers: Sequence[TileLayer], side: Side) -> SideCodes:
        """Of all layers of a plan; raises `AatcError` for codes without searched scales, or of more than 8 bits."""
        codecs = [layer.codecs[side].codec for layer in layers]
        if codecs[0].quantizer == "uniform-token-max":
            raise AatcError("scales that are not searched have no kernel", "encode by the code itself")
        if max(int(layer.codecs[side].bits.max()) for layer in layers) > _WIDEST:
            raise AatcError(f"codes of more than {_WIDEST} bits have no kernel", "encode by the code itself")
        groups, size = codecs[0].groups, int(codecs[0].encode.shape[1])
        made = [_units(codec, layer.biases[side]) for codec, layer in zip(codecs, layers, strict=True)]
        sizes, edges, starts = _magnitudes(codecs[0].quantizer == "uniform")
        return cls(
            groups,
            size,
            torch.stack([matrix for matrix, _ in made]),
            torch.stack([offset for _, offset in made]),
            sizes,
            edges,
            starts,
            codecs[0].scale_bits,
            [_class(layers, side, k) for k in range(layers[0].rule.classes)],
        )


def _units(codec: TransformCodec, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Matrix [groups, E, E] and offset [groups, E] of latents in units of their channels' deviation; 0 without one."""
    spread = codec.variance.double().sqrt()
    inverse = torch.where(spread > 0, 1 / spread.clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(spread))
    groups = codec.groups
    matrix = codec.encode.double() * inverse.view(groups, 1, -1)
    offset = torch.zeros_like(inverse).view(groups, -1)
    if codec.centre is not None:
        offset = offset + (codec.centre.double() * inverse).view(groups, -1)
    if bias is not None:
        offset = offset + (bias.double().view(groups, 1, -1) @ matrix)[:, 0]
    return matrix.float(), offset.float()


def _magnitudes(even: bool) -> tuple[Floats, Floats, Ints]:
    """Magnitudes of all widths one after another, the edge above each, and where those of a width begin."""
    sizes: list[NDArray[Any]] = [np.zeros(1)]
    edges: list[NDArray[Any]] = [np.full(1, np.inf)]
    starts = [0]
    for width in range(1, _WIDEST + 1):
        half = 1 << (width - 1)
        upper: NDArray[Any] = (np.arange(half) + 0.5) * uniform_step(width)
        if width <= LLOYD_BITS and not even:
            upper = levels(width).numpy()[half:].astype(np.float64)
        starts.append(sum(map(len, sizes)))
        sizes.append(upper)
        edges.append(np.concatenate(((upper[1:] + upper[:-1]) / 2, np.full(1, np.inf))))
    return (
        np.concatenate(sizes).astype(np.float32),
        np.concatenate(edges).astype(np.float32),
        np.array(starts, dtype=np.int32),
    )


def _class(layers: Sequence[TileLayer], side: Side, k: int) -> ClassCodes:
    packings = [_side(layer, side) for layer in layers]
    quotas = layers[0].rule.quotas
    groups, size = packings[0].codec.codec.groups, packings[0].size
    shape = (len(layers), groups)
    found = [{part.group: part for part in packing.classes[k]} for packing in packings]
    most = max((sum(d.planes for d in part.digits) for parts in found for part in parts.values()), default=0) or 1
    channel, shift = np.full((*shape, most, DIGITS), -1, np.int32), np.zeros((*shape, most, DIGITS), np.int32)
    at, planes, scale_at = np.zeros((*shape, most), np.int32), np.zeros((*shape, 2), np.int32), np.full(shape, -1)
    for layer, parts in enumerate(found):
        begin = _start(layers[layer], side)
        for group, part in parts.items():
            place, plane = begin + part.start, 0
            for digits in part.digits:
                count = digits.channel.numel()
                own = slice(plane, plane + digits.planes)
                channel[layer, group, own].reshape(-1)[:count] = digits.channel.cpu()
                shift[layer, group, own].reshape(-1)[:count] = digits.shift.cpu()
                word = digits.bits * DIGITS // 8 * part.count
                at[layer, group, own] = place + word * np.arange(digits.planes)
                place, plane = place + word * digits.planes, plane + digits.planes
            planes[layer, group] = part.digits[0].planes, plane
            scale_at[layer, group] = place
    widths = np.stack([packing.codec.bits[k].view(groups, size).cpu().numpy() for packing in packings])
    prices = np.stack([_prices(packing.codec.codec) for packing in packings]).reshape(widths.shape)
    return ClassCodes(
        sum(quotas[:k]),
        quotas[k],
        widths.astype(np.int32),
        np.where(widths > 0, prices, 0).astype(np.float32),
        channel,
        shift,
        at,
        planes,
        scale_at.astype(np.int32),
    )


def _prices(codec: TransformCodec) -> Floats:
    """What a squared error of one unit costs, by channel, the dearest of a group being one."""
    weight = codec.weight if codec.weight is not None else torch.ones_like(codec.variance)
    price = (weight.double() * codec.variance.double()).view(codec.groups, -1)
    price = price / price.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    found: Floats = price.float().cpu().numpy()
    return found


def _side(layer: TileLayer, side: Side) -> SidePacking:
    assert isinstance(layer.held, TilePacking)
    return layer.held.sides[side]


def _start(layer: TileLayer, side: Side) -> int:
    """Where a side begins in a tile."""
    assert isinstance(layer.held, TilePacking)
    return layer.held.header + (0 if side == "k" else layer.held.sides["k"].nbytes)
