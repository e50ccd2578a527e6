"""Tiles as records of 16 tokens, head by head and class by class: the same codes as packed ones, in a kernel's order.

    tile   = of every head, of every class that keeps anything in it: a record for each 16 of its tokens
    record = places [16] u8 | key scales [16] u8 | value scales [16] u8 | digits of keys, of 4 bits, 2 and 1 | of values

Places are those of the tokens in their tile, so the order of a tile takes 8 bits a token of every head. What a record
takes beyond the codes of its widths is words of digits that are not full (`digits`): none where plans fill planes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.scales import pack_scales, unpack_scales
from aatc_cli.core.tile_bytes import TileBytes
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_packing import SidePacking
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused_tiles.digits import ROWS, Digits, digits_of
from aatc_cli.runtime.fused_tiles.fields import Fields, Stored

_HEADER = 3 * ROWS


@dataclass(frozen=True)
class Record:
    """The records of one head and class: digits of both sides, the bytes at which they begin, and those of a record."""

    digits: dict[Side, list[Digits]]
    starts: dict[Side, list[int]]
    nbytes: int

    @classmethod
    def of(cls, widths: Mapping[Side, Sequence[int]]) -> Record:
        """From the widths [E] of the head's channels in the class; no bytes where nothing is kept."""
        digits = {side: digits_of(widths[side], side) for side in SIDES}
        at, starts = _HEADER, {side: list[int]() for side in SIDES}
        for side in SIDES:
            for part in digits[side]:
                starts[side].append(at)
                at += part.nbytes
        return cls(digits, starts, at if at > _HEADER else 0)

    def held(self, side: Side) -> list[tuple[Digits, int]]:
        """Digits of a side of all sizes that there are, and where they begin."""
        return [(part, at) for part, at in zip(self.digits[side], self.starts[side], strict=True) if part.count]


class RecordTiles:
    """One layer's tiles in records: a form of tiles beside `core.tile_packing.TilePacking`, with its codes.

    records[head][class]; starts[head][class] is where the first record of a class lies in a tile of ``nbytes``.
    """

    def __init__(self, codecs: Mapping[Side, TileCodec], rule: TileRule, heads: int) -> None:
        _check(codecs, rule, heads)
        self.rule, self.heads = rule, heads
        self.sides = {side: SidePacking(codecs[side], rule) for side in SIDES}
        self.size = self.sides["k"].size
        self.records: list[list[Record]] = []
        self.starts: list[list[int]] = []
        self.nbytes = 0
        bits = {side: codecs[side].bits.tolist() for side in SIDES}
        for head in range(heads):
            mine = slice(head * self.size, (head + 1) * self.size)
            self.records.append([])
            self.starts.append([])
            for k, quota in enumerate(rule.quotas):
                record = Record.of({side: bits[side][k][mine] for side in SIDES})
                self.records[-1].append(record)
                self.starts[-1].append(self.nbytes)
                self.nbytes += quota // ROWS * record.nbytes

    def on(self, codecs: Mapping[Side, TileCodec]) -> RecordTiles:
        """The same records for the same ``codecs`` on another device."""
        new = copy(self)
        new.sides = {side: SidePacking(codecs[side], self.rule) for side in SIDES}
        return new

    def pack(self, latents: Mapping[Side, Tensor], classes: Tensor) -> Tensor:
        """Tiles [..., nbytes] of latents [..., t, C] of both sides and classes [..., orders, t]."""
        rows = rows_of(classes)
        return self.packed({side: self.sides[side].coded(latents[side], rows) for side in SIDES}, rows)

    def packed(self, coded: Mapping[Side, Sequence[tuple[Tensor, Tensor]]], rows: Tensor) -> Tensor:
        """Tiles [..., nbytes] of codes and token scales by side and class, as of `SidePacking.coded`.

        rows [..., orders, t]: the place in the tile of every row.
        """
        places = rows.expand(*rows.shape[:-2], self.heads, -1).to(torch.uint8)
        pieces = []
        for head in range(self.heads):
            start = 0
            for k, quota in enumerate(self.rule.quotas):
                record = self.records[head][k]
                if record.nbytes:
                    mine = places[..., head, start : start + quota]
                    part = {side: (coded[side][k][0][..., head, :], coded[side][k][1][..., head]) for side in SIDES}
                    pieces.append(_packed(record, mine, part).flatten(-2))
                start += quota
        return torch.cat(pieces, -1) if pieces else places.new_zeros(*rows.shape[:-2], 0)

    def unpack(self, data: Tensor) -> tuple[dict[Side, Tensor], Tensor]:
        """Latents [..., t, C] of both sides by place, and classes [..., orders, t], of tiles [..., nbytes].

        Tokens that a head keeps nothing of are of the lowest class that is not kept.
        """
        coded, rows = self.coded(data)
        classes = torch.zeros_like(rows).scatter_(-1, rows, self.rule.class_of_rank(data.device).expand_as(rows))
        latents = {side: self.sides[side].decoded(coded[side], rows) for side in SIDES}
        return latents, classes[..., : self.rule.orders(self.heads), :]

    def coded(self, data: Tensor) -> tuple[dict[Side, list[tuple[Tensor, Tensor]]], Tensor]:
        """Inverse of `packed`: codes and token scales by side and class, and rows [..., heads, t]."""
        places = self._headers
        found = data.index_select(-1, places.flatten()).view(*data.shape[:-1], *places.shape)
        rows = found[..., 0, :, :].to(torch.int64)
        for head, held, missing in self._missing:
            _fill(rows[..., head, :], held, missing)
        codes = {side: self._fields[side].codes(data) for side in SIDES}
        alpha = {}
        for index, side in enumerate(SIDES, 1):
            scales = unpack_scales(found[..., index, :, :]).to(torch.float16)
            for head, _, missing in self._missing:
                scales[..., head, :].index_fill_(-1, missing, 0.0)
            alpha[side] = scales.transpose(-2, -1)
        return {side: self._by_class(codes[side], alpha[side]) for side in SIDES}, rows

    def bytes_by_cause(self, packed: TileBytes) -> TileBytes:
        """Of one tile, by cause: codes as in ``packed`` tiles, the rest as records hold it."""
        count = sum(
            quota // ROWS * (record.nbytes > 0)
            for row in self.records
            for record, quota in zip(row, self.rule.quotas, strict=True)
        )
        padding = self.nbytes - packed.codes_keys - packed.codes_values - _HEADER * count
        return TileBytes(packed.codes_keys, packed.codes_values, padding, 2.0 * ROWS * count, 1.0 * ROWS * count)

    @property
    def _device(self) -> torch.device:
        return self.sides["k"].codec.codec.encode.device

    @cached_property
    def _headers(self) -> Tensor:
        """Bytes of a tile with places, key scales and value scales of rows: int32 [3, H, t]; zero where none is."""
        found = torch.zeros(3, self.heads, self.rule.tile, dtype=torch.int32)
        for head, row in enumerate(self.records):
            rows = torch.split(found[:, head], list(self.rule.quotas), -1)
            for record, part, start in zip(row, rows, self.starts[head], strict=True):
                blocks = torch.arange(part.shape[1] // ROWS)[:, None] * record.nbytes
                first = (start + blocks + torch.arange(ROWS)).flatten()
                part.copy_(first + ROWS * torch.arange(3)[:, None] if record.nbytes else part)
        return found.to(self._device)

    @cached_property
    def _missing(self) -> list[tuple[int, Tensor, Tensor]]:
        """Heads with rows that no record has: rows that one has, and the others."""
        quotas, found = torch.tensor(self.rule.quotas), []
        for head, row in enumerate(self.records):
            held = torch.tensor([record.nbytes > 0 for record in row]).repeat_interleave(quotas)
            if not bool(held.all()):
                there, missing = (part.nonzero()[:, 0].to(self._device) for part in (held, ~held))
                found.append((head, there, missing))
        return found

    @cached_property
    def _fields(self) -> dict[Side, Fields]:
        found = {}
        for side in SIDES:
            stored = [
                [Stored(start, record.nbytes, record.held(side)) for record, start in zip(row, starts, strict=True)]
                for row, starts in zip(self.records, self.starts, strict=True)
            ]
            found[side] = Fields.of(stored, self.rule.quotas, self.size, side).to(self._device)
        return found

    def _by_class(self, codes: Tensor, alpha: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Codes [..., t, heads, E] and scales [..., t, heads] in the order of the classes, cut into them."""
        quotas = list(self.rule.quotas)
        return list(zip(torch.split(codes, quotas, -3), torch.split(alpha, quotas, -2), strict=True))


def _packed(record: Record, places: Tensor, coded: Mapping[Side, tuple[Tensor, Tensor]]) -> Tensor:
    """Records [..., blocks, nbytes] of places [..., q] and, by side, codes [..., q, E] and scales [..., q]."""
    blocks = [torch.unflatten(places, -1, (-1, ROWS))]
    blocks += [torch.unflatten(pack_scales(coded[side][1]), -1, (-1, ROWS)) for side in SIDES]
    for side in SIDES:
        codes = torch.unflatten(coded[side][0], -2, (-1, ROWS))
        blocks += [digits.pack(codes) for digits in record.digits[side] if digits.count]
    return torch.cat(blocks, -1)


def _fill(rows: Tensor, held: Tensor, missing: Tensor) -> None:
    """Put the places that no record has behind one another into the ``missing`` rows, in place: rows [..., t]."""
    present = torch.zeros_like(rows, dtype=torch.int8).scatter_(-1, rows.index_select(-1, held), 1)
    order = present.argsort(dim=-1, stable=True)[..., : missing.numel()]
    rows.index_copy_(-1, missing, order)


def _check(codecs: Mapping[Side, TileCodec], rule: TileRule, heads: int) -> None:
    """Raise `AatcError` for codecs that records do not hold."""
    other = "use --cache packed"
    for codec in codecs.values():
        if codec.codec.groups != heads:
            raise AatcError("fused tiles need a plan with every kv head on its own", other)
        if codec.codec.scale_bits != 8:
            raise AatcError(f"fused tiles have token scales of 8 bits, this plan {codec.codec.scale_bits}", other)
        if codec.codec.quantizer == "uniform-token-max":
            raise AatcError("fused tiles read levels of Lloyd-Max or even cells, not of a token's maximum", other)
        if int(codec.bits.max()) > 8:
            raise AatcError(f"fused tiles have widths of at most 8 bits, this plan {int(codec.bits.max())}", other)
    if any(quota % ROWS for quota in rule.quotas) or rule.tile != 64:
        raise AatcError(f"fused tiles have 64 tokens in classes of {ROWS}s, this plan {rule.quotas}", other)
