"""Static tables of the append kernel, and its torch twin: exact tokens to tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tiles import BLOCK, SCALE_BYTES, TILE, block_bytes, block_places, pack_block
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables


@dataclass(frozen=True)
class EncodeTables:
    """What turns exact rows of one layer into tiles. H kv heads, D head dim, coded channels first by falling width.

    widths int32 [H, 2, D / 16]; encode float32 [H, 2, D, D], column c making coded latent c; unit, offset, top, spread,
    weight float32 [H, 2, D]: step at token scale one, grid offset, largest code, what a latent is divided by before its
    token scale is looked for, price of its squared error. search is 1 where the token scale is the best of eight.
    """

    widths: Tensor
    encode: Tensor
    unit: Tensor
    offset: Tensor
    top: Tensor
    spread: Tensor
    weight: Tensor
    search: int

    @classmethod
    def of(cls, codecs: dict[Side, TransformCodec], tables: LayerTables) -> EncodeTables:
        """From the codecs of one layer, with one head group per kv head on both sides."""
        heads, size = len(tables.keys), int(codecs["k"].encode.shape[1])
        device = tables.decode.device
        flat = {
            name: torch.zeros(heads, 2, size, device=device) for name in ("unit", "offset", "top", "spread", "weight")
        }
        flat["spread"] += 1
        encode = torch.zeros(heads, 2, size, size, device=device)
        for place, side in enumerate(SIDES):
            codec = codecs[side]
            unit, offset = codec.units()
            search = codec.quantizer != "uniform-token-max"
            price = codec.weight if codec.weight is not None else torch.ones_like(codec.variance)
            values = {
                "unit": unit,
                "offset": offset,
                "top": torch.exp2(codec.bits.to(unit.dtype)) - 1,
                "spread": codec.variance.sqrt() if search else codec.scale,
                "weight": price,
            }
            for head, part in enumerate(tables.keys if side == "k" else tables.values):
                channels, count = head * size + part.order, part.order.numel()
                encode[head, place, :, :count] = codec.encode[head].index_select(1, part.order)
                for name, value in values.items():
                    flat[name][head, place, :count] = value[channels]
        return cls(tables.widths, encode, **flat, search=int(codecs["k"].quantizer != "uniform-token-max"))


def tiles_of(rows: dict[Side, Tensor], codecs: dict[Side, TransformCodec], tables: LayerTables) -> Tensor:
    """Exact rows [n * 64, C], keys before RoPE and without bias, as packed tiles. -> uint8 [n, tile_bytes]."""
    count = rows["k"].shape[0] // TILE
    out = torch.zeros(count, tables.tile_bytes, dtype=torch.uint8, device=rows["k"].device)
    for place, side in enumerate(SIDES):
        codec, parts = codecs[side], tables.keys if side == "k" else tables.values
        codes, alpha = codec.quantize(codec.latents(rows[side]))
        half = torch.where(codec.bits > 0, torch.exp2(codec.bits.to(torch.float64) - 1), 0.0).to(torch.int64)
        unsigned = (codes.to(torch.int64) + half).view(count, TILE, -1)
        for width, blocks in _by_width(parts, side, tables).items():
            channels = torch.stack([channel for channel, _ in blocks])
            packed = pack_block(unsigned[:, :, channels].transpose(1, 2), width, side)
            out[:, torch.stack([places for _, places in blocks]).to(out.device)] = packed
        scales = alpha.view(count, TILE, len(parts)).transpose(1, 2).contiguous().view(torch.uint8)
        ends = tables.offsets[1:].to(torch.int64) - SCALE_BYTES + place * SCALE_BYTES // 2
        out[:, ends[:, None] + torch.arange(SCALE_BYTES // 2, device=out.device)] = scales
    return out


def _by_width(parts: tuple[HeadSide, ...], side: Side, tables: LayerTables) -> dict[int, list[tuple[Tensor, Tensor]]]:
    """Site channels [16] and places of the bytes of every block of one side, by width."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    size = tables.decode.shape[-1]
    for head, part in enumerate(parts):
        start = int(tables.offsets[head])
        if side == "v":
            start += sum(block_bytes(width) for width in tables.keys[head].widths)
        for index, (width, places) in enumerate(zip(part.widths, block_places(part.widths, side), strict=True)):
            channels = head * size + part.order[BLOCK * index : BLOCK * (index + 1)]
            found.setdefault(width, []).append((channels, start + places))
    return found
