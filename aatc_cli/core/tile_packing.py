"""A tile as bytes and back: the classes of its tokens, and by side, class and head group the codes and token scales.

    tile  = classes of every order | keys | values
    side  = of every class k: of every head group that codes anything in it: planes of 2 bits | planes of 1 bit | scales
    plane = one word of 16 digits for each of the class's tokens, digit i in bits 2 i .. 2 i + 1 (or in bit i)

A code u = code + 2^(w-1) of w bits is one digit of one bit, u mod 2, where w is odd, and floor(w / 2) digits of two
bits above it, lowest first. Digits stand in the order of their channels, tokens of a class in that of their places in
the tile. `core.tile_bytes` says how many bytes that is; the last digits of a plane may be unused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.casting import saturated
from aatc_cli.core.scales import pack_scales, unpack_scales
from aatc_cli.core.tile_bytes import ALIGNMENT, DIGITS, order_bytes
from aatc_cli.core.tile_classes import rows_of
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_digits import Digits, digits_of_all
from aatc_cli.core.tile_rule import TileRule, class_bits
from aatc_cli.core.tile_tags import pack_classes, unpack_classes


@dataclass(frozen=True)
class Part:
    """One head group of one class of a side: where its bytes begin in the side, and what they are."""

    group: int
    start: int
    digits: tuple[Digits, ...]
    count: int
    scale_bits: int

    def sizes(self) -> list[int]:
        """Bytes of the planes of each size, then of the scales."""
        planes = [part.planes * self.count * part.bits * DIGITS // 8 for part in self.digits]
        return [*planes, self.count * self.scale_bits // 8]

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + sum(self.sizes())

    def pack(self, codes: Tensor, alpha: Tensor) -> list[Tensor]:
        """The bytes [...] of codes u [..., q, E] and scales alpha [..., q], piece by piece."""
        return [*(part.pack(codes) for part in self.digits), _scale_bytes(alpha, self.scale_bits)]

    def unpack(self, data: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Codes u [..., q, E] and scales [..., q] float16 of the side's bytes [..., n]."""
        pieces = torch.split(data[..., self.start : self.stop], self.sizes(), -1)
        codes = torch.zeros(*data.shape[:-1], self.count, size, dtype=torch.int64, device=data.device)
        for part, piece in zip(self.digits, pieces[:-1], strict=True):
            if part.planes:
                codes += part.unpack(piece, self.count, size)
        return codes, _scales_of(pieces[-1], self.scale_bits)


class SidePacking:
    """How the codes of one side of one layer lie in a tile, and what they decode to.

    classes[k] holds the parts of class k.
    """

    def __init__(self, codec: TileCodec, rule: TileRule) -> None:
        self.codec, self.rule = codec, rule
        self.size = int(codec.codec.encode.shape[1])
        # one quantizer for all of a class's tokens: tables are made once
        self.quantizers = [codec.of_class(k) for k in range(rule.classes)]

    @cached_property
    def classes(self) -> list[list[Part]]:
        """The parts of every class: made when a tile is packed or read so, for other forms of tiles have none."""
        codec = self.codec
        by_group = torch.unflatten(codec.bits.cpu(), 1, (codec.codec.groups, self.size))
        coded = [[group for group, widths in enumerate(row) if bool(widths.any())] for row in by_group]
        wanted = [(by_group[k, group], bits) for k, row in enumerate(coded) for group in row for bits in (2, 1)]
        digits, start, found = iter(digits_of_all(wanted, codec.bits.device)), 0, list[list[Part]]()
        for row, quota in zip(coded, self.rule.quotas, strict=True):
            found.append([])
            for group in row:
                found[-1].append(Part(group, start, (next(digits), next(digits)), quota, codec.codec.scale_bits))
                start = found[-1][-1].stop
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the side in a tile."""
        return max((part.stop for parts in self.classes for part in parts), default=0)

    def pack(self, latents: Tensor, rows: Tensor) -> Tensor:
        """Bytes [..., nbytes] of the latents [..., t, C] of whole tiles.

        rows [..., orders, t]: the place in the tile of every row, rows lying by class (`core.tile_classes.rows_of`);
        one order, or one for every head group.
        """
        pieces = []
        for parts, (whole, alpha) in zip(self.classes, self.coded(latents, rows), strict=True):
            for part in parts:
                pieces += part.pack(whole[..., part.group, :], alpha[..., part.group])
        return torch.cat(pieces, -1) if pieces else latents.new_zeros(*latents.shape[:-2], 0).to(torch.uint8)

    def coded(self, latents: Tensor, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Codes u [..., q, groups, E] int64 and token scales [..., q, groups] of the tokens of every class.

        Arguments as of `pack`: what it packs, before it is bytes.
        """
        by_group = torch.unflatten(latents, -1, (self.codec.codec.groups, self.size)).transpose(-2, -3)
        index = rows.expand(*by_group.shape[:-1])[..., None].expand_as(by_group)
        ranked = by_group.gather(-2, index)
        found, start = [], 0
        for quantizer, quota in zip(self.quantizers, self.rule.quotas, strict=True):
            mine = ranked[..., start : start + quota, :].transpose(-2, -3).flatten(-2)
            codes, alpha = quantizer.quantize(mine)
            whole = torch.unflatten(codes.to(torch.int64), -1, (-1, self.size)) + self._half(quantizer.bits)
            found.append((whole, alpha))
            start += quota
        return found

    def unpack(self, data: Tensor, rows: Tensor) -> Tensor:
        """Latents [..., t, C] of the bytes [..., nbytes] of whole tiles, tokens in the order of their places."""
        groups, lead = self.codec.codec.groups, data.shape[:-1]
        found = []
        for parts, quota in zip(self.classes, self.rule.quotas, strict=True):
            codes = torch.zeros(*lead, quota, groups, self.size, dtype=torch.int64, device=data.device)
            alpha = torch.zeros(*lead, quota, groups, dtype=torch.float16, device=data.device)
            for part in parts:
                codes[..., part.group, :], alpha[..., part.group] = part.unpack(data, self.size)
            found.append((codes, alpha))
        return self.decoded(found, rows)

    def decoded(self, coded: Sequence[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        """Latents [..., t, C] of what `coded` gives, tokens in the order of their places."""
        ranked = []
        for quantizer, (codes, alpha) in zip(self.quantizers, coded, strict=True):
            signed = (codes - self._half(quantizer.bits)).flatten(-2).to(torch.int32)
            ranked.append(quantizer.dequantize(signed, alpha))
        by_group = torch.unflatten(torch.cat(ranked, -2), -1, (self.codec.codec.groups, self.size)).transpose(-2, -3)
        index = rows.expand(*by_group.shape[:-1])[..., None].expand_as(by_group)
        return torch.zeros_like(by_group).scatter_(-2, index, by_group).transpose(-2, -3).flatten(-2)

    def _half(self, bits: Tensor) -> Tensor:
        """2^(w-1) of every channel, 0 without bits: int64 [groups, E]."""
        return ((1 << bits.to(torch.int64)) >> 1).masked_fill(bits == 0, 0).view(-1, self.size)


class TilePacking:
    """One layer's tiles as bytes: ``nbytes`` each, classes first, then keys and values."""

    def __init__(self, codecs: Mapping[Side, TileCodec], rule: TileRule, heads: int) -> None:
        self.rule, self.heads = rule, heads
        self.sides = {side: SidePacking(codecs[side], rule) for side in SIDES}
        self.header = order_bytes(rule, heads)
        self.nbytes = self.header + sum(side.nbytes for side in self.sides.values())

    def pack(self, latents: Mapping[Side, Tensor], classes: Tensor) -> Tensor:
        """Tiles [..., nbytes] of latents [..., t, C] of both sides and classes [..., orders, t]."""
        rows = rows_of(classes)
        head = pack_classes(classes, self.rule.classes)
        room = -head.shape[-1] % ALIGNMENT
        head = torch.nn.functional.pad(head, (0, room)).flatten(-2)
        return torch.cat([head, *(self.sides[side].pack(latents[side], rows) for side in SIDES)], -1)

    def classes_of(self, data: Tensor) -> Tensor:
        """Classes [..., orders, t] of the tokens of tiles [..., nbytes]."""
        orders = self.rule.orders(self.heads)
        if self.rule.classes == 1:
            return torch.zeros(*data.shape[:-1], orders, self.rule.tile, dtype=torch.int64, device=data.device)
        head = torch.unflatten(data[..., : self.header], -1, (orders, -1))
        return unpack_classes(head[..., : class_bits(self.rule.classes) * self.rule.tile // 8], self.rule.classes)

    def unpack(self, data: Tensor) -> tuple[dict[Side, Tensor], Tensor]:
        """Latents [..., t, C] of both sides by place, and classes [..., orders, t], of tiles [..., nbytes]."""
        classes = self.classes_of(data)
        rows, start = rows_of(classes), self.header
        found: dict[Side, Tensor] = {}
        for side in SIDES:
            stop = start + self.sides[side].nbytes
            found[side] = self.sides[side].unpack(data[..., start:stop], rows)
            start = stop
        return found, classes


def _scale_bytes(alpha: Tensor, bits: int) -> Tensor:
    """Scales alpha [..., q] float16 as bytes."""
    if bits == 16:
        return saturated(alpha, torch.float16).contiguous().view(torch.uint8)
    codes = pack_scales(alpha, bits)
    return codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4


def _scales_of(data: Tensor, bits: int) -> Tensor:
    """Scales float16 [..., q] of their bytes."""
    if bits == 16:
        return data.contiguous().view(torch.float16)
    codes = data if bits == 8 else torch.stack((data & 15, data >> 4), -1).flatten(-2)
    return unpack_scales(codes, bits)
