"""Key matrix of a head in integers, for tensor cores that multiply bytes: any GPU from compute capability 8 on.

The rows unit_c B_c are rounded to eight bits against one scale per rotary pair; the sum over codes u_c runs in
integers, starts at minus the sum of the offsets, and the pair's scale is left to the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.tiles import BLOCK, LANES

# a float32 with this bit pattern plus a small integer reads as 1.5 * 2^23 plus that integer
MAGIC = 0x4B400000
# the sums are halved this often on the way to float16, and the query is larger for it
HALVED = 64


@dataclass(frozen=True)
class IntegerKeys:
    """One layer's keys for ``decode.cu``. H kv heads, D head dim, J = D / 16 lots of 8 rotary pairs, F of them fast.

    matrix int8 in fragment order [H, F, D / 32, 32, 16]; start int32 [H, F, 4, 2, 4]; slow float16 in fragment order
    [H, J, J - F, 32, 8]; code_offsets int32 [H, J, 4], offsets as bytes, doubled when ``halves`` is 1; pair_scale
    float32 [H, D / 2].
    """

    matrix: Tensor
    start: Tensor
    slow: Tensor
    code_offsets: Tensor
    pair_scale: Tensor
    halves: int

    @classmethod
    def of(cls, rows: Sequence[Tensor], offsets: Sequence[Tensor], dim: int, fast: int) -> IntegerKeys:
        """From every head's rows [A, D] and offsets [A], A a multiple of 16."""
        integer = [_integer_rows(part, dim) for part in rows]
        slow = [slow_rows(part, dim, fast, dim) for part in rows]
        pair_scale = torch.stack([scale for _, scale in integer]) * HALVED
        pair_scale[:, 8 * fast :] = torch.stack([largest for _, largest in slow])[:, None]
        halves = int(any(bool((part % 1 != 0).any()) for part in offsets))
        return cls(
            torch.stack([_fragments(part, dim)[:fast] for part, _ in integer]),
            torch.stack([_starts(part, given, dim)[:fast] for (part, _), given in zip(integer, offsets, strict=True)]),
            torch.stack([part for part, _ in slow]),
            torch.stack([offset_codes(part, dim, halves) for part in offsets]),
            pair_scale,
            halves,
        )

    @staticmethod
    def rounded(rows: Tensor, widths: tuple[int, ...], dim: int, fast: int) -> Tensor:
        """Rows [A, D] with those of fast pairs as the integers hold them, whatever their widths. -> float64."""
        integer, scale = _integer_rows(rows, dim)
        held = integer[: rows.shape[0]].to(torch.float64) * scale.to(torch.float64).repeat(2)
        fast_columns = torch.arange(dim, device=rows.device) % (dim // 2) < 8 * fast
        return torch.where(fast_columns, held, rows.to(torch.float64))

    @property
    def steps(self) -> int:
        """Steps of 32 channels that a launch is compiled for: 0, for it takes any."""
        return 0

    @property
    def kinds(self) -> int:
        """As of `planes.KeyPlanes`; 0, for the loop takes any."""
        return 0

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What the kernel is given, in its order."""
        return self.matrix, self.start, self.slow, self.code_offsets, self.pair_scale


def slow_rows(rows: Tensor, dim: int, fast: int, channels: int) -> tuple[Tensor, Tensor]:
    """Rows [A, D] of the slow pairs over their largest element, in the order of mma.m16n8k16's first operand.

    -> float16 [``channels`` / 16 (blocks), D / 16 - F (steps), 32, 8], and that element. Row 2 t + e of a block is
    channel 4 t + e and row 8 + 2 t + e channel 4 t + 2 + e, so that the transposed product has the channels of a code
    word together.
    """
    padded = torch.zeros(channels, dim, dtype=torch.float64, device=rows.device)
    padded[: rows.shape[0]] = rows.to(torch.float64)
    slow = torch.cat((padded[:, 8 * fast : dim // 2], padded[:, dim // 2 + 8 * fast :]), 1)
    largest = slow.abs().amax() if slow.numel() else torch.ones((), dtype=torch.float64, device=rows.device)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest)).to(torch.float32)
    lane, slot = torch.arange(LANES, device=rows.device), torch.arange(8, device=rows.device)
    row = (lane // 4)[:, None] + 8 * (slot // 2 % 2)
    channel = 4 * (row % 8 // 2) + row % 2 + 2 * (row // 8)
    steps = torch.arange(dim // BLOCK - fast, device=rows.device)[:, None, None]
    column = 8 * (fast + steps) + 2 * (lane % 4)[:, None] + slot % 2 + dim // 2 * (slot // 4)
    block = BLOCK * torch.arange(channels // BLOCK, device=rows.device)[:, None, None, None]
    picked = padded[block + channel, column.expand(channels // BLOCK, *column.shape)]
    return (picked / largest.to(torch.float64)).to(torch.float16), largest


def offset_codes(offset: Tensor, channels: int, halves: int) -> Tensor:
    """Offsets (doubled when they are halves) as bytes, four channels a word. -> int32 [channels / 16, 4]."""
    codes = torch.zeros(channels, dtype=torch.uint8, device=offset.device)
    codes[: offset.numel()] = (offset * (1 + halves)).to(torch.uint8)
    return codes.view(torch.int32).view(channels // BLOCK, 4)


def _integer_rows(rows: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Rows [A, D] as int8 against one scale per rotary pair (d, d + D / 2): int64 [D, D] padded, float32 [D / 2]."""
    padded = torch.zeros(dim, dim, dtype=torch.float64, device=rows.device)
    padded[: rows.shape[0]] = rows.to(torch.float64)
    largest = padded.abs().amax(0).view(2, dim // 2).amax(0)
    scale = (torch.where(largest > 0, largest, torch.ones_like(largest)) / 127).to(torch.float32)
    return (padded / scale.to(torch.float64).repeat(2)).round().to(torch.int64), scale


def _fragments(rows: Tensor, dim: int) -> Tensor:
    """Integer rows [D, D] in the order of mma.m16n8k32's second operand. -> int8 [D / 16, D / 32, 32, 16].

    Lane 4 g + t of step k holds, for column 8 j + g and for column D / 2 + 8 j + g, channels 32 k + 4 t .. + 3 and
    32 k + 16 + 4 t .. + 3.
    """
    pairs, steps = dim // BLOCK, dim // 32
    lane = torch.arange(LANES, device=rows.device)
    group, quad = lane // 4, lane % 4
    byte = torch.arange(16, device=rows.device)
    inner = 16 * (byte // 4 % 2) + byte % 4
    channel = 32 * torch.arange(steps, device=rows.device)[:, None, None] + 4 * quad[None, :, None] + inner
    column = 8 * torch.arange(pairs, device=rows.device)[:, None, None] + group[None, :, None] + dim // 2 * (byte // 8)
    return rows[channel[None], column[:, None]].to(torch.int8)


def _starts(rows: Tensor, offset: Tensor, dim: int) -> Tensor:
    """Accumulator starts: the magic number minus sum_c offset_c B_c, rounded. -> int32 [D / 16, 4 (t), 2, 4]."""
    total = -(offset.to(torch.float64) @ rows[: offset.numel()].to(torch.float64)).round().to(torch.int64)
    quad = torch.arange(4, device=rows.device)
    first = 8 * torch.arange(dim // BLOCK, device=rows.device)[:, None, None] + 2 * quad[None, :, None]
    column = first.unsqueeze(-1) + torch.tensor([[0, 1, 0, 1], [dim // 2, dim // 2 + 1] * 2], device=rows.device)
    return (MAGIC + total[column]).to(torch.int32)
