"""Key matrix of a head in 8-bit floats, for Hopper's warpgroup products: every plane of code bits is a factor.

A field of one or two bits in a byte is, read as an e4m3 float, itself times 2^-9. So a plane of codes is multiplied as
it lies, with the rows unit_c B_c times the weight of its bits; rows are rounded to e4m3 (three bits behind the leading
one) against one scale per rotary pair, and that scale is left to the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.tiles import BLOCK, block_bytes
from aatc_cli.runtime.kernels.integer_keys import offset_codes, slow_rows

_LARGEST, _UNIT = 448.0, 2.0**-9
# what the kernel has registers and shared memory for
_MOST_DIM, _MOST_FAST, _MOST_STEPS = 128, 8, 10


@dataclass(frozen=True)
class KeyPlanes:
    """One layer's keys for ``decode_sm90.cu``. H kv heads, D head dim, J = D / 16 lots of 8 pairs, F of them fast.

    planes int32 [H, P, 2]: byte in a head's record, and bits, 0 for none; cores uint8 (e4m3) [H, P / 2, 2 F, 2, 8, 16]:
    steps of 32 channels, lots of 8 columns, halves of a step, columns, channels; start int32 [H, 2 F, 4], two float16
    each; slow float16 [H, P, J - F, 32, 8] and code_offsets int32 [H, P, 4] as of `IntegerKeys`, by planes;
    pair_scale float32 [H, D / 2]. Bit n of ``kinds`` is set where a head has n planes of two bits.
    """

    planes: Tensor
    cores: Tensor
    start: Tensor
    slow: Tensor
    code_offsets: Tensor
    pair_scale: Tensor
    halves: int
    kinds: int

    @classmethod
    def of(
        cls, rows: Sequence[Tensor], offsets: Sequence[Tensor], widths: Sequence[tuple[int, ...]], dim: int, fast: int
    ) -> KeyPlanes | None:
        """From every head's rows [A, D], offsets [A] and widths of blocks; None where the kernel has no room."""
        planes = [_planes(mine) for mine in widths]
        steps = max(1, *(-(-len(found) // 2) for found in planes))
        if dim > _MOST_DIM or fast > _MOST_FAST or steps > _MOST_STEPS:
            return None
        halves = int(any(bool((part % 1 != 0).any()) for part in offsets))
        made = [
            _head(part, given, found, 2 * steps, dim, fast, halves)
            for part, given, found in zip(rows, offsets, planes, strict=True)
        ]
        kinds = sum(1 << twos for twos in {sum(plane.bits == 2 for plane in found) for found in planes})
        table = torch.zeros(len(made), 2 * steps, 2, dtype=torch.int32)
        for head, found in enumerate(planes):
            table[head, : len(found)] = torch.tensor([(plane.at, plane.bits) for plane in found], dtype=torch.int32)
        cores, start, slow, codes, pair_scale = (torch.stack(part) for part in zip(*made, strict=True))
        return cls(table.to(rows[0].device), cores, start, slow, codes, pair_scale, halves, kinds)

    @staticmethod
    def rounded(rows: Tensor, widths: tuple[int, ...], dim: int, fast: int) -> Tensor:
        """Rows [A, D] as the planes hold those of fast pairs, and those of slow pairs as they are. -> float64."""
        weight = torch.tensor([2.0 ** max(0, width - 2) for width in widths], dtype=torch.float64)
        top = rows.to(torch.float64) * weight.to(rows.device).repeat_interleave(BLOCK)[:, None]
        scale = _scale(top, dim).to(torch.float64).repeat(2)
        held = (rows.to(torch.float64) / scale).to(torch.float32).to(torch.float8_e4m3fn).to(torch.float64) * scale
        fast_columns = torch.arange(dim, device=rows.device) % (dim // 2) < 8 * fast
        return torch.where(fast_columns, held, rows.to(torch.float64))

    @property
    def steps(self) -> int:
        """Steps of 32 channels that a launch is compiled for."""
        return self.cores.shape[1]

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What the kernel is given, in its order."""
        return self.planes, self.cores, self.start, self.slow, self.code_offsets, self.pair_scale


@dataclass(frozen=True)
class _Plane:
    block: int
    at: int
    bits: int
    shift: int


def _planes(widths: tuple[int, ...]) -> list[_Plane]:
    """Planes of a head's key blocks: two bits each from the top, one for an odd width; those of two bits first."""
    found, start = [], 0
    for block, width in enumerate(widths):
        at, left = start, width
        while left:
            bits = min(left, 2)
            left -= bits
            found.append(_Plane(block, at, bits, left))
            at += block_bytes(bits)
        start += block_bytes(width)
    return sorted(found, key=lambda plane: -plane.bits)


def _head(
    rows: Tensor, offset: Tensor, planes: list[_Plane], count: int, dim: int, fast: int, halves: int
) -> tuple[Tensor, ...]:
    """cores, start, slow, code_offsets, pair_scale of one head with ``count`` planes, empty ones included."""
    of_planes = torch.zeros(count * BLOCK, dim, dtype=torch.float64, device=rows.device)
    given = torch.zeros(count * BLOCK, dtype=torch.float64, device=rows.device)
    rest = offset.to(torch.float64).clone()
    for place, plane in enumerate(planes):
        mine, block = (
            slice(BLOCK * place, BLOCK * place + BLOCK),
            slice(BLOCK * plane.block, BLOCK * plane.block + BLOCK),
        )
        weight = 2.0**plane.shift
        of_planes[mine] = rows[block].to(torch.float64) * weight
        # the digits of an offset, a half among the last
        given[mine] = (rest[block] / weight).floor() if plane.shift else rest[block]
        rest[block] -= given[mine] * weight
    scale = _scale(of_planes, dim)
    floats = (of_planes / scale.to(torch.float64).repeat(2)).to(torch.float32).to(torch.float8_e4m3fn)
    column = torch.arange(8 * fast, device=rows.device).view(fast, 1, 8)
    columns = torch.cat((column, column + dim // 2), 1).flatten()
    picked = floats.view(torch.uint8)[:, columns].view(count // 2, 2, BLOCK, 2 * fast, 8)
    begin = -(given @ floats.to(torch.float64))[columns] * _UNIT
    slow, slow_scale = slow_rows(of_planes, dim, fast, count * BLOCK)
    pair_scale = scale / _UNIT
    pair_scale[8 * fast :] = slow_scale
    return (
        picked.permute(0, 3, 1, 4, 2).contiguous(),
        begin.to(torch.float16).view(torch.int32).view(2 * fast, 4),
        slow, offset_codes(given, count * BLOCK, halves), pair_scale,
    )  # fmt: skip


def _scale(rows: Tensor, dim: int) -> Tensor:
    """What an e4m3 of one stands for in each rotary pair of rows [.., D]. -> float32 [D / 2]."""
    largest = rows.abs().amax(0).view(2, dim // 2).amax(0)
    return torch.where(largest > 0, largest, torch.ones_like(largest)).to(torch.float32) / _LARGEST
