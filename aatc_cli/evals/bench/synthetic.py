"""Tables and tiles without a model: random rows and codes of a given mean width, for measuring kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.core.tiles import BLOCK, SCALE_BYTES
from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.encode import EncodeTables
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables

# widths of 8 blocks of a head at two bits, as water-filling leaves them; what is missing has no bits
_SHAPES = ((4, 3, 3, 2, 2, 1, 1), (4, 4, 2, 2, 2, 1, 1), (3, 3, 3, 2, 2, 2, 1), (8, 3, 2, 2, 1))


def block_widths(blocks: int, bits: float, head: int) -> tuple[int, ...]:
    """Falling widths of at most ``blocks`` blocks with a sum of ``bits`` * blocks, one of four shapes by ``head``.

    Raises `AatcError` for a mean of less than one block's bit or more than 8.
    """
    total = round(bits * blocks)
    if not 1 <= total <= 8 * blocks:
        raise AatcError(f"{bits:g} bits do not make tiles of {blocks} blocks", "use a budget between 0.5 and 8")
    shape = (*_SHAPES[head % len(_SHAPES)], 0, 0, 0)
    widths = [min(round(shape[8 * block // blocks] * bits / 2), 8) for block in range(blocks)]
    while sum(widths) != total:
        # the widest that can give or the narrowest that can take, so that the shape stays falling
        step = 1 if sum(widths) < total else -1
        places = [i for i, w in enumerate(widths) if (w < 8 if step > 0 else w > 0)]
        place = min(places, key=lambda i: (widths[i], i)) if step > 0 else max(places, key=lambda i: (widths[i], -i))
        widths[place] += step
        widths.sort(reverse=True)
    return tuple(width for width in widths if width)


def synthetic_tables(
    geometry: Geometry, bits: float, fast: int, device: torch.device, seed: int = 0, hopper: bool = False
) -> LayerTables:
    """Random tables of one layer; every channel's grid step weighs about the same, as allocation would have it."""
    generator = torch.Generator().manual_seed(seed)
    blocks = geometry.head_dim // BLOCK

    def side(head: int) -> HeadSide:
        widths = block_widths(blocks, bits, head)
        each = torch.tensor(widths, dtype=torch.float64).repeat_interleave(BLOCK)
        rows = torch.randn(each.numel(), geometry.head_dim, generator=generator, dtype=torch.float64)
        rows *= 0.5 / each.numel() ** 0.5
        offset = (torch.exp2(each) - 1) / 2
        return HeadSide(
            torch.arange(each.numel(), device=device), widths, rows.float().to(device), offset.float().to(device)
        )

    heads = range(geometry.kv_heads)
    keys, values = [side(head) for head in heads], [side(head + 1) for head in heads]
    return LayerTables.of(keys, values, geometry.head_dim, fast, hopper)


def random_tiles(batch: int, tiles: int, tables: LayerTables, generator: torch.Generator) -> Tensor:
    """Random codes with token scales between a half and one and a half. -> uint8 [B, tiles, tile_bytes]."""
    device = tables.decode.device
    data = torch.randint(
        0, 256, (batch, tiles, tables.tile_bytes), dtype=torch.uint8, device=device, generator=generator
    )
    for end in tables.offsets[1:].tolist():
        scales = 0.5 + torch.rand(batch, tiles, SCALE_BYTES // 2, device=device, generator=generator)
        data[:, :, end - SCALE_BYTES : end] = scales.to(torch.float16).view(torch.uint8)
    return data


def synthetic_encode(tables: LayerTables, geometry: Geometry, seed: int = 0) -> EncodeTables:
    """Random encode matrices and grids that go with ``tables``; new tokens become codes, of nothing in particular."""
    device, dim = tables.decode.device, geometry.head_dim
    generator = torch.Generator(device).manual_seed(seed)
    shape = (geometry.kv_heads, 2, dim)
    encode = torch.randn(*shape, dim, device=device, generator=generator) / dim**0.5
    top = torch.exp2(tables.widths.repeat_interleave(BLOCK, 2).to(torch.float32)) - 1
    ones = torch.ones(shape, device=device)
    return EncodeTables(tables.widths, encode, ones / 2, top / 2, top, ones, ones, search=1)
