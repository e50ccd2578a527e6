"""Torch twin of the kernel of tiles with classes: the same tables and bytes, float64 inside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.rope import apply_rope
from aatc_cli.core.transform import decode
from aatc_cli.models.adapter import rebias
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.tiles.layer import TileLayer


@dataclass(frozen=True)
class TileQuery:
    """What a call of decode attention is given beside tiles.

    query [B, Hq, D], rotated; keys, values [B, slots, C]: exact rows, keys before RoPE; tokens, tiles int32 [B];
    frequencies [D / 2]; first: the position of the first token behind the sinks; lags: distances that count.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    tokens: Tensor
    tiles: Tensor
    frequencies: Tensor
    sinks: int
    first: int
    scaling: float
    lags: tuple[int, int]


def decode_attention(
    layer: TileLayer, data: list[Tensor], given: TileQuery, tables: TileTables | None = None
) -> tuple[Tensor, Tensor]:
    """Attention [B, Hq, D] and what exact tokens receive of it [B, H, slots], in float64.

    data: the tiles [n, tile_bytes] of every sequence, in order. With ``tables``, of dimensions that lie as pairs, keys
    are read by the rows that their matrices hold, which are rounded.
    """
    out, received = [], []
    for row in range(given.query.shape[0]):
        attended, paid = _one(layer, data[row], given, row, tables)
        out.append(attended)
        received.append(paid)
    return torch.stack(out), torch.stack(received)


def _one(
    layer: TileLayer, data: Tensor, given: TileQuery, row: int, tables: TileTables | None
) -> tuple[Tensor, Tensor]:
    heads, total, packed = layer.heads, int(given.tokens[row]), 64 * int(given.tiles[row])
    slots = given.keys.shape[1]
    near, place = exact_places(total, packed, given.sinks, slots, given.query.device)
    far_keys, far_values, dropped = _decoded(layer, data[: packed // 64])
    if tables is not None and packed:
        far_keys = _keys_as_read(layer, data[: packed // 64], tables)
    keys = torch.cat((far_keys, _by_head(given.keys[row, place], heads)), 1)
    values = torch.cat((far_values, _by_head(given.values[row, place], heads)), 1)
    index = torch.cat((given.sinks + torch.arange(packed, device=near.device), near))
    angle = (index - given.sinks + given.first).to(torch.float64)[:, None] * given.frequencies.to(torch.float64).repeat(
        2
    )
    keys = apply_rope(keys[None], angle.cos()[None], angle.sin()[None])[0]
    query = torch.unflatten(given.query[row].to(torch.float64), 0, (heads, -1))
    scores = query @ keys.mT * given.scaling
    hidden = torch.zeros(heads, index.numel(), dtype=torch.bool, device=near.device)
    hidden[:, :packed] = dropped
    shares = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
    lag = total - 1 - near
    watched = (lag >= given.lags[0]) & (lag <= given.lags[1]) & (near >= given.sinks)
    received = torch.zeros(heads, slots, dtype=torch.float64, device=near.device)
    received[:, place] = (shares[..., packed:] * watched).square().sum(1)
    return (shares @ values).flatten(0, 1), received


def _decoded(layer: TileLayer, data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys before RoPE and values [H, n, D] of tiles, and where a head keeps nothing of a token [H, n]."""
    latents, classes = layer.held.unpack(data)
    found: dict[Side, Tensor] = {}
    for side in SIDES:
        matrix = layer.codecs[side].codec.decode.to(torch.float64)
        rows = rebias(decode(latents[side].to(torch.float64), matrix), layer.biases[side])
        found[side] = _by_head(rows.flatten(0, 1), layer.heads)
    by_head = classes.transpose(0, 1).flatten(1).expand(layer.heads, -1)
    gone = torch.zeros_like(by_head, dtype=torch.bool)
    if layer.dropped is not None:
        gone = layer.dropped[by_head, torch.arange(layer.heads, device=by_head.device)[:, None]]
    return found["k"], found["v"], gone


def _keys_as_read(layer: TileLayer, data: Tensor, tables: TileTables) -> Tensor:
    """Keys before RoPE [H, n, D] of tiles by the rows of ``tables``."""
    held = layer.held
    assert isinstance(held, RecordTiles)
    coded, rows = held.coded(data)
    found = torch.zeros(held.heads, data.shape[0], layer.rule.tile, held.size, dtype=torch.float64, device=data.device)
    for head in range(held.heads):
        start = 0
        for k, quota in enumerate(layer.rule.quotas):
            codes, alpha = coded["k"][k]
            digits = [part.middled(codes[..., head, :]) for part in held.records[head][k].digits["k"]]
            keys = torch.cat(digits, -1) @ tables.key_rows[head * layer.rule.classes + k].to(found)
            place = rows[:, head, start : start + quota, None].expand(-1, -1, held.size)
            found[head].scatter_(1, place, alpha[..., head, None].to(torch.float64) * keys)
            start += quota
    offset = layer.codecs["k"].codec.offset(layer.biases["k"])
    if offset is not None:
        found += offset.to(found).view(held.heads, 1, 1, held.size)
    return found.flatten(1, 2)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return torch.unflatten(rows.to(torch.float64), -1, (heads, -1)).transpose(0, 1)


def exact_places(total: int, packed: int, sinks: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens held exactly, by index, and the slot of each."""
    first = torch.arange(min(total, sinks), device=device)
    recent = torch.arange(sinks + packed, max(total, sinks + packed), device=device)
    return torch.cat((first, recent)), torch.cat((first, sinks + (recent - sinks) % (slots - sinks)))
