"""The bytes of a tile: codes as digits in planes, token scales, and the class of every token. All are constants.

A code of w bits is floor(w / 2) digits of two bits and, where w is odd, one digit of one bit. The digits of one size
that a head group has in a class fill planes of 16, in any order: a plane holds 16 digits of each of the class's tokens,
so widths are free per channel and what is lost to padding is less than one plane of each size.

    bytes of a class of q tokens and a head group = q (4 planes of two bits + 2 planes of one bit + scale, if coded)

A tile adds the class of every token, in ceil(log2 n) bits for each order, to multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core import SIDES, Side
from aatc_cli.core.tile_rule import TileRule, class_bits

Ints = NDArray[np.int64]

DIGITS = 16  # digits of a plane
ALIGNMENT = 16  # bytes


def planes_of(widths: Ints) -> tuple[Ints, Ints]:
    """Planes of two-bit and of one-bit digits of head groups with ``widths`` [..., E]. -> [...], [...]."""
    twos, ones = (widths // 2).sum(-1), (widths % 2).sum(-1)
    return -(-twos // DIGITS), -(-ones // DIGITS)


def plane_bits(twos: Ints, ones: Ints) -> Ints:
    """Bits of one token in so many planes."""
    bits: Ints = DIGITS * (2 * twos + ones)
    return bits


@dataclass(frozen=True)
class TileBytes:
    """Bytes of one tile of one layer by cause."""

    codes_keys: float
    codes_values: float
    padding: float
    token_scales: float
    classes: float

    @classmethod
    def of(
        cls,
        widths: Mapping[Side, Ints],
        rule: TileRule,
        heads: int,
        scale_bits: int,
        expected: Sequence[float] | None = None,
    ) -> TileBytes:
        """Of a layer whose classes have ``widths[side]`` [n, groups, E]; ``heads`` kv heads.

        expected: bits that codes of each width take in the mean, where they have no fixed size and lie in no planes.
        """
        quotas = np.array(rule.quotas)
        codes: dict[Side, float] = {}
        stored = scales = 0.0
        for side in SIDES:
            if expected is not None:
                codes[side] = float(np.array(expected)[widths[side]].sum((1, 2)) @ quotas) / 8
                stored += codes[side]
                continue
            codes[side] = float(widths[side].sum((1, 2)) @ quotas) / 8
            stored += float(plane_bits(*planes_of(widths[side])).sum(1) @ quotas) / 8
            scales += scale_bits * float(widths[side].any(-1).sum(1) @ quotas) / 8
        return cls(codes["k"], codes["v"], stored - codes["k"] - codes["v"], scales, float(order_bytes(rule, heads)))

    @property
    def total(self) -> float:
        """All of them; a whole number, since each part of a class is a multiple of 16 bytes for quotas of 16."""
        return self.codes_keys + self.codes_values + self.padding + self.token_scales + self.classes


def order_bytes(rule: TileRule, heads: int) -> int:
    """Bytes of the classes of one tile of a layer, with what alignment adds."""
    one = class_bits(rule.classes) * rule.tile // 8
    return rule.orders(heads) * (-(-one // ALIGNMENT) * ALIGNMENT)


def packed_bits(tiles: Sequence[TileBytes], tile: int, channels: int) -> float:
    """Bits of a packed number with everything a tile holds, over layers of C ``channels``: keys and values alike."""
    return 8 * sum(part.total for part in tiles) / (len(tiles) * tile * 2 * channels)
