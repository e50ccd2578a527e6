"""Tiles: the packed form that the fused decode kernel reads, 64 tokens of one kv head in the order of its registers.

A tile is the codes of the keys, those of the values, and both token scales (float16 [64] each). Channels are sorted by
falling width and cut into blocks of 16 that share a width; zero-bit channels are absent. A block of width w takes
128 w bytes, as 32-bit words in planes of 2 bits and at most one of 1 bit, the most significant first (5 = 2 + 2 + 1).
Planes of keys lie by falling bits, those of values by their rank in a block, and blocks follow one another in each.

Lane l = 4 g + t of a warp reads its own words. Keys: byte b of a word belongs to channel 4 t + b, and tokens
8 g .. 8 g + 7 follow one another in its bits (the last four of a plane of two bits 32 words further on). Values: byte
2 h + e of a word belongs to tokens 8 (2 t + h) + 2 n + e; its bits hold channels g and g + 8 in turn, first of n = 0
and 1, those of n = 2 and 3 in the next word (in the bits between, where a plane has one bit). So one mask gives
operands of integer matrix products for both channels, the second ones four times as large.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.core import Side

TILE = 64
BLOCK = 16
LANES = 32
MAX_WIDTH = 8
SCALE_BYTES = 2 * TILE * 2


def block_bytes(width: int) -> int:
    """Bytes of 64 tokens of 16 channels at ``width`` bits."""
    return TILE * BLOCK * width // 8


def pack_block(codes: Tensor, width: int, side: Side) -> Tensor:
    """Bytes of one block. codes [..., 64, 16] unsigned integers below 2^width -> uint8 [..., 128 width]."""
    fields = codes.to(torch.int64).flatten(-2)
    parts = []
    left = width
    for plane in _planes(width):
        left -= plane
        word, shift = _places(side, plane)
        field = (fields >> left) & ((1 << plane) - 1)
        words = torch.zeros(*fields.shape[:-1], LANES * plane, dtype=torch.int64, device=codes.device)
        index = word.to(codes.device).expand_as(fields)
        parts.append(words.scatter_add_(-1, index, field << shift.to(codes.device)))
    if not parts:
        return torch.empty(*codes.shape[:-2], 0, dtype=torch.uint8, device=codes.device)
    words = torch.cat(parts, -1)
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return signed.view(torch.uint8)


def unpack_block(data: Tensor, width: int, side: Side) -> Tensor:
    """Inverse of `pack_block`: uint8 [..., 128 width] -> int64 [..., 64, 16]."""
    codes = torch.zeros(*data.shape[:-1], TILE * BLOCK, dtype=torch.int64, device=data.device)
    start = 0
    for plane in _planes(width):
        size = LANES * plane * 4
        words = data[..., start : start + size].contiguous().view(torch.int32).to(torch.int64)
        word, shift = _places(side, plane)
        field = words.index_select(-1, word.to(data.device)) >> shift.to(data.device)
        codes = (codes << plane) | (field & ((1 << plane) - 1))
        start += size
    return torch.unflatten(codes, -1, (TILE, BLOCK))


def plane_starts(widths: Sequence[int], side: Side) -> list[list[int]]:
    """First byte of every plane of every block, from where the codes of its side begin; blocks by falling width."""
    planes = [(block, rank, bits) for block, width in enumerate(widths) for rank, bits in enumerate(_planes(width))]
    order = sorted(planes, key=lambda plane: -plane[2]) if side == "k" else sorted(planes, key=lambda plane: plane[1])
    starts: list[list[int]] = [[0] * len(_planes(width)) for width in widths]
    at = 0
    for block, rank, bits in order:
        starts[block][rank] = at
        at += block_bytes(bits)
    return starts


def block_places(widths: Sequence[int], side: Side) -> list[Tensor]:
    """Places of the bytes of `pack_block` for every block, from where the codes of its side begin. [128 width] each."""
    return [
        torch.cat(
            [torch.arange(start, start + block_bytes(bits)) for start, bits in zip(starts, _planes(width), strict=True)]
        )
        for starts, width in zip(plane_starts(widths, side), widths, strict=True)
    ]


def _planes(width: int) -> tuple[int, ...]:
    return (2,) * (width // 2) + (1,) * (width % 2)


@lru_cache
def _places(side: Side, plane: int) -> tuple[Tensor, Tensor]:
    """Word and bit of every (token, channel) of a block in one plane. [1024] each."""
    token = torch.arange(TILE)[:, None].expand(TILE, BLOCK)
    channel = torch.arange(BLOCK).expand(TILE, BLOCK)
    word, shift = _key_places(token, channel, plane) if side == "k" else _value_places(token, channel, plane)
    return word.flatten(), shift.flatten()


def _key_places(token: Tensor, channel: Tensor, plane: int) -> tuple[Tensor, Tensor]:
    row, share = token % 8, 8 // plane
    lane = 4 * (token // 8) + channel // 4
    return lane + LANES * (row // share), 8 * (channel % 4) + plane * (row % share)


def _value_places(token: Tensor, channel: Tensor, plane: int) -> tuple[Tensor, Tensor]:
    upper, lane = channel // 8, 4 * (channel % 8) + token // 16
    byte, step = 16 * (token // 8 % 2) + 8 * (token % 2), token % 8 // 2
    bit = byte + 4 * (step % 2) + 2 * upper
    return (lane, bit + step // 2) if plane == 1 else (2 * lane + step // 2, bit)
