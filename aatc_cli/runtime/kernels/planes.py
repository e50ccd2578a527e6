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

from aatc_cli.core.tiles import BLOCK, plane_starts
from aatc_cli.runtime.kernels.integer_keys import slow_rows

_LARGEST, _UNIT = 448.0, 2.0**-9
# what the kernel reads in place of a code where the plane of the offsets is
_ONE = 16.0
# what the kernel has registers and shared memory for
_MOST_DIM, _MOST_FAST, _MOST_STEPS = 128, 8, 10


@dataclass(frozen=True)
class KeyPlanes:
    """One layer's keys for ``decode_sm90.cu``. H kv heads, D head dim, J = D / 16 lots of 8 pairs, F of them fast.

    planes int32 [H, P, 4]: byte in a head's record, bits (0 for none), block and weight (a float32) of a plane;
    plane 0 stands for the offsets, those of two bits are next; cores uint8 (e4m3) [H, P / 2, 2 F, 2, 8, 16]: steps of
    32 channels, lots of 8 columns, halves of a step, columns, channels; slow float16 [H, J + 1, J - F, 32, 8] as of
    `slow_rows`, by blocks and with the offsets' block last; pair_scale float32 [H, D / 2]; norm float32 [H], the
    longest row that absorbs a query. Bit n of ``kinds`` is set where a head has n planes of two bits.
    """

    planes: Tensor
    cores: Tensor
    slow: Tensor
    pair_scale: Tensor
    norm: Tensor
    kinds: int
    # offsets are rows of their own here
    halves: int = 0

    @classmethod
    def of(
        cls, rows: Sequence[Tensor], offsets: Sequence[Tensor], widths: Sequence[tuple[int, ...]], dim: int, fast: int
    ) -> KeyPlanes | None:
        """From every head's rows [A, D], offsets [A] and widths of blocks; None where the kernel has no room."""
        planes = [_planes(mine) for mine in widths]
        steps = max(1 + len(found) // 2 for found in planes)
        if dim > _MOST_DIM or fast > _MOST_FAST or steps > _MOST_STEPS:
            return None
        made = [
            _head(part, given, found, 2 * steps, dim, fast)
            for part, given, found in zip(rows, offsets, planes, strict=True)
        ]
        kinds = sum(1 << twos for twos in {sum(plane.bits == 2 for plane in found) for found in planes})
        table = torch.zeros(len(made), 2 * steps, 4, dtype=torch.int32)
        table[:, 0, 2] = dim // BLOCK
        for head, found in enumerate(planes):
            for place, plane in enumerate(found, 1):
                weight = torch.tensor(2.0**plane.shift).view(torch.int32)
                table[head, place] = torch.tensor((plane.at, plane.bits, plane.block, int(weight)))
        cores, slow, pair_scale, norm = (torch.stack(part) for part in zip(*made, strict=True))
        return cls(table.to(rows[0].device), cores, slow, pair_scale, norm, kinds)

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
        return self.planes, self.cores, self.slow, self.pair_scale, self.norm


@dataclass(frozen=True)
class _Plane:
    block: int
    at: int
    bits: int
    shift: int


def _planes(widths: tuple[int, ...]) -> list[_Plane]:
    """Planes of a head's key blocks, as they lie: those of two bits first."""
    found = []
    for block, (width, starts) in enumerate(zip(widths, plane_starts(widths, "k"), strict=True)):
        for rank, at in enumerate(starts):
            found.append(_Plane(block, at, min(2, width - 2 * rank), max(0, width - 2 * rank - 2)))
    return sorted(found, key=lambda plane: plane.at)


def _head(rows: Tensor, offset: Tensor, planes: list[_Plane], count: int, dim: int, fast: int) -> tuple[Tensor, ...]:
    """cores, slow, pair_scale, norm of one head with ``count`` planes, that of the offsets and empty ones included."""
    rows, offset = rows.to(torch.float64), offset.to(torch.float64)
    of_planes = torch.zeros(count, BLOCK, dim, dtype=torch.float64, device=rows.device)
    given = torch.zeros(count, BLOCK, dtype=torch.float64, device=rows.device)
    rest = offset.clone()
    for place, plane in enumerate(planes, 1):
        block, weight = slice(BLOCK * plane.block, BLOCK * plane.block + BLOCK), 2.0**plane.shift
        of_planes[place] = rows[block] * weight
        # the digits of an offset, a half among the last
        given[place] = (rest[block] / weight).floor() if plane.shift else rest[block]
        rest[block] -= given[place] * weight
    scale = _scale(of_planes.flatten(0, 1), dim)
    floats = (of_planes / scale.to(torch.float64).repeat(2)).to(torch.float32).to(torch.float8_e4m3fn)
    floats[0] = _digits(-(given.flatten() @ floats.to(torch.float64).flatten(0, 1)) / _ONE)
    column = torch.arange(8 * fast, device=rows.device).view(fast, 1, 8)
    columns = torch.cat((column, column + dim // 2), 1).flatten()
    picked = floats.view(torch.uint8)[:, :, columns].view(count // 2, 2, BLOCK, 2 * fast, 8)
    of_blocks = torch.zeros(dim + BLOCK, dim, dtype=torch.float64, device=rows.device)
    of_blocks[: rows.shape[0]] = rows
    of_blocks[dim:] = -(offset @ rows) / _ONE
    slow, slow_scale = slow_rows(of_blocks, dim, fast, dim + BLOCK)
    pair_scale = scale / _UNIT
    pair_scale[8 * fast :] = slow_scale
    of_planes[0] = of_blocks[dim:]
    longest = of_planes[:, :, torch.arange(dim, device=rows.device) % (dim // 2) >= 8 * fast].norm(dim=-1).amax()
    return picked.permute(0, 3, 1, 4, 2).contiguous(), slow, pair_scale, longest.to(torch.float32) / slow_scale


def _digits(wanted: Tensor) -> Tensor:
    """Sixteen e4m3 numbers that add up to each of ``wanted`` [D]: what one leaves goes to the next. -> [16, D]."""
    found, rest = [], wanted.clone()
    for _ in range(BLOCK):
        found.append(rest.clamp(-_LARGEST, _LARGEST).to(torch.float32).to(torch.float8_e4m3fn))
        rest -= found[-1].to(torch.float64)
    return torch.stack(found)


def _scale(rows: Tensor, dim: int) -> Tensor:
    """What an e4m3 of one stands for in each rotary pair of rows [.., D]. -> float32 [D / 2]."""
    largest = rows.abs().amax(0).view(2, dim // 2).amax(0)
    return torch.where(largest > 0, largest, torch.ones_like(largest)).to(torch.float32) / _LARGEST
