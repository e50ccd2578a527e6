"""Slots of a record: which channels of a head lie where, for 16 tokens of one class, and at what width they are stored.

Codes are read as operands of a matrix instruction, whose lane l = 4 g + t has rows g and g + 8 of four columns

    column i = 0 .. 3 of a lane   2 t, 2 t + 1, 2 t + 8, 2 t + 9   of the sixteen of a step

Keys are multiplied with tokens as rows: what a lane reads are four *slots* of channels, a quad, of two tokens. Values
are multiplied with channels as rows: a lane reads a *pair* of channels of four tokens. Quads and pairs are entities;
the codes of an entity are stored at one width, in parts of 4, 2 and 1 bits, each for all of its lanes together:

    part of 4 bits  32 bits a lane   row r, column i in bits 16 r + 4 i ..     of code bits 0 .. 3
    part of 2 bits  16 bits a lane   row r, column i in bits 4 i + 2 r ..      of the next two
    part of 1 bit    8 bits a lane   row r, column i in bit 4 r + i            of the next

A code of eight bits has two parts of four. Channels lie by falling width, so that entities mix widths only where one
ends: a pair is stored at the larger of its widths, a quad of at most three bits is filled up with empty slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import Side

ROWS = 16
NARROW = 3  # widths that one table of eight levels serves
# tokens of a row block by (lane, column) of values, and by (row, lane) of keys
_COLUMN = (0, 1, 8, 9)


@dataclass(frozen=True)
class Entity:
    """Slots that a lane reads together: channels, -1 for an empty slot, and the width they are stored at."""

    channels: tuple[int, ...]
    width: int

    @property
    def wide(self) -> bool:
        """Whether its codes are looked up one by one."""
        return self.width > NARROW


@dataclass(frozen=True)
class Part:
    """Bits ``shift`` .. ``shift`` + ``bits`` - 1 of the codes of some entities: entity i of them lies at ``at`` + i."""

    bits: int
    shift: int
    entity: int
    at: int


def entities_of(widths: Sequence[int], side: Side) -> list[Entity]:
    """Quads of keys or pairs of values of one head and class, by falling width; ``widths`` of its channels [E]."""
    order = sorted((c for c in range(len(widths)) if widths[c]), key=lambda c: (-widths[c], c))
    if side == "v":
        pairs = [order[i : i + 2] for i in range(0, len(order), 2)]
        return [Entity(_filled(pair, 2), widths[pair[0]]) for pair in pairs]
    wide = [c for c in order if widths[c] > NARROW]
    quads = [wide[i : i + 4] for i in range(0, len(wide), 4)]
    for width in range(NARROW, 0, -1):
        mine = [c for c in order if widths[c] == width]
        quads += [mine[i : i + 4] for i in range(0, len(mine), 4)]
    return [Entity(_filled(quad, 4), widths[quad[0]]) for quad in quads]


def per_step(side: Side) -> int:
    """Entities of a step of sixteen slots."""
    return 4 if side == "k" else 8


def lanes_of(side: Side) -> int:
    """Lanes that share an entity."""
    return 8 if side == "k" else 4


def slot_channels(entities: Sequence[Entity], side: Side) -> list[int]:
    """Channels of the slots of all steps, in the order of the product's columns (keys) or rows (values)."""
    each = per_step(side)
    steps = -(-len(entities) // each)
    found = [-1] * (ROWS * steps)
    for place, entity in enumerate(entities):
        step, lane = divmod(place, each)
        for index, channel in enumerate(entity.channels):
            slot = 2 * lane + _COLUMN[index] if side == "k" else lane + 8 * index
            found[ROWS * step + slot] = channel
    return found


def code_index(code: Tensor, width: int) -> Tensor:
    """Where the level of a code stands in the table of codes stored at ``width``: parts one behind another.

    Up to `NARROW` bits that is the two-bit part, then the bit; else bits 0 .. 3, the two-bit part in bits 4 and 5, the
    bit in bit 6, or the second part of four bits in 4 .. 7.
    """
    if width == 1:
        return code << 2
    if width <= NARROW or width in (4, 6, 7, 8):
        return code
    return (code & 15) | (code >> 4) << 6


def wide_index(code: Tensor, width: int) -> Tensor:
    """The same in a step where entities of more than `NARROW` bits lie beside narrower ones: those have no low part."""
    if width > NARROW:
        return code_index(code, width)
    return code << 6 if width == 1 else (code & 3) << 4 | (code >> 2) << 6


def parts_of(width: int) -> list[tuple[int, int]]:
    """Bits and shift of the parts of a code of ``width`` bits."""
    found, shift = [], 0
    for bits in (4, 4, 2, 1):
        if width - shift >= bits and (bits == 4 or width % (2 * bits) >= bits):
            found.append((bits, shift))
            shift += bits
    return found


def arranged(codes: Tensor, entities: Sequence[Entity], side: Side) -> Tensor:
    """Codes u [..., 16, E] of a row block as lanes have them: [..., entities, lanes, 2 rows, 4 columns]."""
    padded = torch.nn.functional.pad(codes, (0, 1))
    index = torch.tensor([entity.channels for entity in entities], dtype=torch.int64, device=codes.device)
    found = padded[..., index.flatten()].unflatten(-1, index.shape)
    if side == "k":
        by_lane = found.unflatten(-3, (2, 8))  # [..., r, g, entities, i]
        return by_lane.movedim(-2, -4).transpose(-3, -2)
    tokens = torch.tensor([[2 * t + c for c in _COLUMN] for t in range(4)], device=codes.device)
    by_lane = found[..., tokens.flatten(), :, :].unflatten(-3, (4, 4))  # [..., t, i, entities, r]
    return by_lane.movedim(-2, -4).transpose(-2, -1)


def restored(lanes: Tensor, entities: Sequence[Entity], side: Side, size: int) -> Tensor:
    """Inverse of `arranged`: codes [..., 16, E] with zero where no channel lies; E is ``size``."""
    index = torch.tensor([entity.channels for entity in entities], dtype=torch.int64, device=lanes.device).flatten()
    if side == "k":
        tokens = lanes.transpose(-3, -2).movedim(-4, -2).flatten(-4, -3)  # [..., 16, entities, i]
    else:
        by_lane = lanes.transpose(-2, -1).movedim(-4, -2).flatten(-4, -3)
        places = torch.tensor([2 * t + c for t in range(4) for c in _COLUMN], device=lanes.device)
        tokens = torch.empty_like(by_lane)
        tokens[..., places, :, :] = by_lane
    found = torch.zeros(*tokens.shape[:-2], size + 1, dtype=lanes.dtype, device=lanes.device)
    found[..., index] = tokens.flatten(-2)
    return found[..., :size]


def _filled(channels: Sequence[int], count: int) -> tuple[int, ...]:
    return (*channels, *[-1] * (count - len(channels)))
