"""Tiles with classes without a model: codecs of a given size with random transforms, and tiles of random tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.runtime.fused_tiles.records import RecordTiles

RULE = TileRule((32, 16, 16))
# bits that classes have beside the average, and how far widths of a head fall from its first channel to its last: as
# in a plan of SmolLM2 at two bits
_OF_CLASS, _FALL = (-1.3, 0.0, 3.0), 3.0


def synthetic_codecs(geometry: Geometry, bits: float, device: torch.device, seed: int = 0) -> dict[Side, TileCodec]:
    """Codecs of one layer whose tiles take at most ``bits`` a number with all that a record holds.

    Widths fall along the channels of a head as those of a plan do, heads and sides a little apart.
    """
    low, high = -4.0, 9.0
    for _ in range(12):
        middle = (low + high) / 2
        codecs = _codecs(geometry, middle, device, seed)
        nbytes = RecordTiles(codecs, RULE, geometry.kv_heads).nbytes
        low, high = (middle, high) if 8 * nbytes <= bits * RULE.tile * 2 * geometry.channels else (low, middle)
    return _codecs(geometry, low, device, seed)


def synthetic_tiles(
    codecs: dict[Side, TileCodec], tiles: RecordTiles, count: int, generator: torch.Generator
) -> Tensor:
    """Tiles of random tokens, ranked at random: uint8 [count, tile_bytes]."""
    device = generator.device
    orders, channels = tiles.rule.orders(tiles.heads), int(codecs["k"].bits.shape[1])
    latents = {}
    for side in SIDES:
        size = 0.5 + torch.rand(count, tiles.rule.tile, 1, device=device, generator=generator)
        normal = torch.randn(count, tiles.rule.tile, channels, device=device, generator=generator)
        latents[side] = normal * size * codecs[side].codec.variance.sqrt().to(device)
    ranks = torch.rand(count, orders, tiles.rule.tile, device=device, generator=generator)
    return tiles.pack(latents, tiles.rule.classes_of(ranks, 0, 0))


def _codecs(geometry: Geometry, level: float, device: torch.device, seed: int) -> dict[Side, TileCodec]:
    found: dict[Side, TileCodec] = {}
    heads, size = geometry.kv_heads, geometry.head_dim
    fall = _FALL * (1 - 2 * torch.arange(size, dtype=torch.float64) / size) / 2
    for place, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(2 * seed + place)
        apart = 0.3 * torch.randn(heads, 1, generator=generator, dtype=torch.float64)
        wanted = (level + fall + apart).flatten() + torch.tensor(_OF_CLASS, dtype=torch.float64)[:, None]
        bits = wanted.round().clamp(0, 8).to(torch.int64)
        matrix = torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64))[0]
        # tokens of unit size: energies fall as widths do
        energy = torch.exp2(2 * fall).repeat(heads)
        variance = energy / energy.mean()
        ones = torch.ones_like(variance)
        codec = TransformCodec(
            matrix, matrix.mT.contiguous(), ones, bits[0], variance, "uniform", scale_bits=8, restored=0.5
        )
        found[side] = TileCodec(codec, bits, RULE).to(device, torch.float32)
    return found
