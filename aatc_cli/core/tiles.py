"""Tiles: the packed form that the fused decode kernel reads, 64 tokens of one kv head in the order of its registers.

A tile is the codes of the keys, those of the values, and both token scales (float16 [64] each). Channels are sorted by
falling width and cut into blocks of 16 that share a width; zero-bit channels are absent. A block of width w takes
128 w bytes, as 32-bit words in planes of 2 bits and at most one of 1 bit, the most significant first (5 = 2 + 2 + 1).

Lane l = 4 g + t of a warp reads its own words. Keys: byte b of a word belongs to channel 4 t + b, and tokens
8 g .. 8 g + 7 follow one another in its bits (the last four of a plane of two bits 32 words further on), so that one
shift and one mask give the operand of an integer matrix product. Values: the two halves of a word hold tokens of
neighbouring lane groups, so that one mask gives two float16 numbers (u times a power of two, below the normal range,
which tensor cores read exactly).
"""

from __future__ import annotations

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
    half, step, row = 16 * (token // 8 % 2), token % 8 // 2, token % 2
    if plane == 1:
        return lane, half + 8 * row + upper + 2 * step
    return lane * 2 + upper, half + 8 * row + 2 * step
