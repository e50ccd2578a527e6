"""Slots of a record: which channels of a head lie where, for 16 tokens of one class, and at what width they are stored.

Codes are read as operands of a matrix instruction, whose lane l = 4 g + t has rows g and g + 8 of four columns

    column i = 0 .. 3 of a lane   2 t, 2 t + 1, 2 t + 8, 2 t + 9   of the sixteen of a step

Keys are multiplied with tokens as rows: what a lane reads are four *slots* of channels, a quad, of two tokens. Values
are multiplied with channels as rows: a lane reads a *pair* of channels of four tokens. Quads and pairs are entities;
the codes of an entity are stored at one width, in parts of 4, 2 and 1 bits, each for all of its lanes together:

    part of 4 bits  32 bits a lane   row r, column i in bits 16 r + 4 i ..     of code bits 0 .. 3
    part of 2 bits  16 bits a lane   row r, column i in bits 4 i + 2 r ..      of the next two
    part of 1 bit    8 bits a lane   row r, column i in bit 4 r + i            of the next

A code of eight bits has two parts of four. What is stored at four bits is a sign in bit 3 and the place of a magnitude.
Steps are wide (any widths, codes looked up one by one), then of four bits, then narrow (at most three), each kind in
steps of its own, the last of them filled up. Channels lie by falling width, so that entities mix widths only where one
ends; they are stored at the larger one, and quads that do are in wide steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import Side

ROWS = 16
FOUR = 4
# tokens of a row block by (lane, column) of values, and by (row, lane) of keys
_COLUMN = (0, 1, 8, 9)


@dataclass(frozen=True)
class Entity:
    """Slots that a lane reads together: channels, -1 for an empty slot, their widths, and the width they are stored at.

    An entity of nothing but empty slots is stored at zero bits.
    """

    channels: tuple[int, ...]
    widths: tuple[int, ...]
    width: int

    @property
    def mixed(self) -> bool:
        """Whether its channels are of several widths."""
        return len({width for width in self.widths if width}) > 1


@dataclass(frozen=True)
class Steps:
    """The entities of a side in their order, and how many steps are wide, of four bits, and narrow."""

    entities: tuple[Entity, ...]
    wide: int
    four: int
    narrow: int

    @property
    def count(self) -> int:
        """Steps in all."""
        return self.wide + self.four + self.narrow


@dataclass(frozen=True)
class Part:
    """Bits ``shift`` .. ``shift`` + ``bits`` - 1 of the codes of some entities: entity i of them lies at ``at`` + i."""

    bits: int
    shift: int
    entity: int
    at: int


def steps_of(widths: Sequence[int], side: Side) -> Steps:
    """Quads of keys or pairs of values of one head and class; ``widths`` of its channels [E]."""
    order = sorted((c for c in range(len(widths)) if widths[c]), key=lambda c: (-widths[c], c))
    each, slots = per_step(side), 4 if side == "k" else 2
    found = [_entity(order[i : i + slots], widths, slots) for i in range(0, len(order), slots)]
    # one table serves the four channels of a quad, so those of several widths are looked up one by one
    apart = [entity.width > FOUR or (side == "k" and entity.mixed) for entity in found]
    kinds = [
        [entity for entity, alone in zip(found, apart, strict=True) if alone],
        [entity for entity, alone in zip(found, apart, strict=True) if not alone and entity.width == FOUR],
        [entity for entity, alone in zip(found, apart, strict=True) if not alone and entity.width < FOUR],
    ]
    # what is left of a wide step takes codes of four bits
    room = -len(kinds[0]) % each
    kinds[0], kinds[1] = kinds[0] + kinds[1][:room], kinds[1][room:]
    none = Entity((-1,) * slots, (0,) * slots, 0)
    whole = [kind + [none] * (-len(kind) % each) for kind in kinds]
    counts = [len(kind) // each for kind in whole]
    return Steps(tuple(entity for kind in whole for entity in kind), *counts)


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


def stored(codes: Tensor, widths: Tensor, at: Tensor) -> Tensor:
    """What stands for ``codes`` of ``widths`` bits in entities stored at ``at`` bits, all of one shape.

    At four bits a sign in bit 3 and the place of a magnitude, counted from zero outward; else the code itself.
    """
    half = (1 << widths) >> 1
    signed = torch.where(codes >= half, codes - half, half - 1 - codes | 8)
    return torch.where(at == FOUR, signed, codes)


def unstored(words: Tensor, widths: Tensor, at: Tensor) -> Tensor:
    """Inverse of `stored`."""
    half = (1 << widths) >> 1
    codes = torch.where(words & 8 > 0, half - 1 - (words & 7), half + (words & 7))
    return torch.where(at == FOUR, codes, words)


def wide_index(words: Tensor, width: int) -> Tensor:
    """Where the level of what is stored at ``width`` bits stands in a table of a wide step.

    Parts of four bits in bits 0 .. 3 and 4 .. 7, that of two in 4 and 5, the single bit in 6.
    """
    parts = parts_of(width)
    if (4, 0) not in parts:
        return (words & 3) << 4 | (words >> 2) << 6 if width > 1 else words << 6
    return words if width != 5 else (words & 15) | (words >> 4) << 6


def parts_of(width: int) -> list[tuple[int, int]]:
    """Bits and shift of the parts of a code of ``width`` bits."""
    found, shift = [], 0
    for bits in (4, 4, 2, 1):
        if width - shift >= bits and (bits == 4 or width % (2 * bits) >= bits):
            found.append((bits, shift))
            shift += bits
    return found


def arranged(codes: Tensor, entities: Sequence[Entity], side: Side) -> Tensor:
    """What is stored of codes u [..., 16, E] of a row block, by lanes: [..., entities, lanes, 2 rows, 4 columns]."""
    padded = torch.nn.functional.pad(codes, (0, 1))
    index = torch.tensor([entity.channels for entity in entities], dtype=torch.int64, device=codes.device)
    by_slot = torch.unflatten(padded[..., index.flatten()], -1, index.shape)
    found = stored(by_slot, *_widths(entities, codes.device))
    if side == "k":
        by_lane = torch.unflatten(found, -3, (2, 8))  # [..., r, g, entities, i]
        return by_lane.movedim(-2, -4).transpose(-3, -2)
    tokens = torch.tensor([[2 * t + c for c in _COLUMN] for t in range(4)], device=codes.device)
    by_lane = torch.unflatten(found[..., tokens.flatten(), :, :], -3, (4, 4))  # [..., t, i, entities, r]
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
    codes = unstored(tokens, *_widths(entities, lanes.device))
    found = torch.zeros(*tokens.shape[:-2], size + 1, dtype=lanes.dtype, device=lanes.device)
    found[..., index] = codes.flatten(-2)
    return found[..., :size]


def _entity(channels: Sequence[int], widths: Sequence[int], slots: int) -> Entity:
    empty = [-1] * (slots - len(channels))
    mine = [widths[c] for c in channels]
    return Entity((*channels, *empty), (*mine, *[0] * len(empty)), max(mine))


def _widths(entities: Sequence[Entity], device: torch.device) -> tuple[Tensor, Tensor]:
    """Widths of the slots of entities, and those they are stored at: int64 [entities, slots]."""
    widths = torch.tensor([entity.widths for entity in entities], dtype=torch.int64, device=device)
    at = torch.tensor([entity.width for entity in entities], dtype=torch.int64, device=device)
    return widths, at[:, None].expand_as(widths)
