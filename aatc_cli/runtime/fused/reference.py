"""Torch twins of the fused kernels: the same arguments, the same bytes read, float64 inside."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.tiles import BLOCK, SCALE_BYTES, TILE, block_bytes, block_places, unpack_block
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables


def unpack_tiles(data: Tensor, tables: LayerTables, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and token scales of one head in ``data`` uint8 [n, tile_bytes].

    -> u_k [n * 64, A_k], u_v [n * 64, A_v], alpha_k, alpha_v [n * 64]; codes are unsigned integers in float64.
    """
    start = int(tables.offsets[head])
    sides: list[Tensor] = []
    names: tuple[Side, Side] = ("k", "v")
    for side, part in zip(names, (tables.keys[head], tables.values[head]), strict=True):
        blocks = [
            unpack_block(data[:, start + places.to(data.device)], width, side)
            for width, places in zip(part.widths, block_places(part.widths, side), strict=True)
        ]
        start += sum(block_bytes(width) for width in part.widths)
        empty = torch.empty(data.shape[0], TILE, 0, dtype=torch.int64, device=data.device)
        sides.append(torch.cat([empty, *blocks], -1).flatten(0, 1).to(torch.float64))
    scales = data[:, start : start + SCALE_BYTES].contiguous().view(torch.float16).to(torch.float64)
    return sides[0], sides[1], scales[:, :TILE].flatten(), scales[:, TILE:].flatten()


def head_vectors(codes: Tensor, alpha: Tensor, part: HeadSide) -> Tensor:
    """Vectors of unsigned codes [n, A] and token scales [n]: alpha (u - offset) @ rows. -> float64 [n, D]."""
    return (codes - part.offset.to(torch.float64)) @ part.rows.to(torch.float64) * alpha[:, None]


def decode_attention(
    query: Tensor,
    data: Tensor,
    tables: LayerTables,
    frequencies: Tensor,
    exact: tuple[Tensor, Tensor],
    counters: tuple[Tensor, Tensor, Tensor],
    *,
    sinks: int,
    scaling: float,
) -> Tensor:
    """Attention of one rotated query per sequence [B, Hq, D] over sinks, tiles and window, in float64. -> [B, Hq, D].

    data uint8 [B, max_tiles, tile_bytes]. exact: keys before RoPE and values [B, slots, H D] of exact tokens; slots are
    the sinks and then a ring. counters int32 [B]: cached tokens, packed tiles, first visible token. scaling: of scores.
    """
    heads, (keys, values), (tokens, tiles, hidden) = len(tables.keys), exact, counters
    out = []
    for row in range(query.shape[0]):
        total, packed = int(tokens[row]), TILE * int(tiles[row])
        places = _exact_tokens(total, packed, sinks, keys.shape[1], query.device)
        per_head = []
        for head, (k_near, v_near) in enumerate(
            zip(_by_head(keys[row, places[1]], heads), _by_head(values[row, places[1]], heads), strict=True)
        ):
            u_k, u_v, a_k, a_v = unpack_tiles(data[row, : int(tiles[row])], tables, head)
            k = torch.cat((head_vectors(u_k, a_k, tables.keys[head]), k_near))
            v = torch.cat((head_vectors(u_v, a_v, tables.values[head]), v_near))
            position = torch.cat((sinks + torch.arange(packed, device=query.device), places[0]))
            angle = position.to(torch.float64)[:, None] * frequencies.to(torch.float64).repeat(2)
            k = apply_rope(k[None, None], angle.cos()[None], angle.sin()[None])[0, 0]
            group = query.shape[1] // heads
            scores = query[row, head * group : (head + 1) * group].to(torch.float64) @ k.T * scaling
            scores = scores.masked_fill(position < int(hidden[row]), -torch.inf)
            per_head.append(scores.softmax(-1) @ v)
        out.append(torch.cat(per_head))
    return torch.stack(out)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return torch.unflatten(rows.to(torch.float64), -1, (heads, -1)).transpose(0, 1)


def _exact_tokens(total: int, packed: int, sinks: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token indices held exactly, and the slot of each."""
    first = torch.arange(min(total, sinks), device=device)
    recent = torch.arange(sinks + packed, max(total, sinks + packed), device=device)
    return torch.cat((first, recent)), torch.cat((first, sinks + (recent - sinks) % (slots - sinks)))


assert TILE % BLOCK == 0
