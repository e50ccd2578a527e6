"""What the decode kernel keeps of one layer besides tokens: widths, integer key matrix, value matrix, offsets.

Keys of a kv head are k = alpha sum_c unit_c (u_c - offset_c) B_c. With the rows unit_c B_c rounded to eight bits
against one scale per rotary pair, the sum over u_c runs on integer tensor cores, starts at minus the sum of the
offsets, and the pair's scale is left to the query. Values stay sums of u_c; unit, offset and decode matrix are applied
once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tiles import BLOCK, LANES, MAX_WIDTH, SCALE_BYTES, block_bytes
from aatc_cli.errors import AatcError

# a float32 with this bit pattern plus a small integer reads as 1.5 * 2^23 plus that integer
MAGIC = 0x4B400000


@dataclass(frozen=True)
class HeadSide:
    """Coded channels of one side of one kv head, by falling width.

    order [A], widths of the blocks, rows [A, D], offset [A]; rows are unit_c B_c: (u - offset) @ rows * alpha is
    the vector. A is a multiple of 16.
    """

    order: Tensor
    widths: tuple[int, ...]
    rows: Tensor
    offset: Tensor

    @classmethod
    def of(cls, codec: TransformCodec, head: int) -> HeadSide:
        """From a codec with one head group per kv head.

        Raises `AatcError` when channels of one width do not fill blocks of 16 or a width has no tile form.
        """
        size = int(codec.encode.shape[1])
        bits = codec.bits[head * size : (head + 1) * size].cpu()
        order = sorted((c for c in range(size) if bits[c] > 0), key=lambda c: (-int(bits[c]), c))
        found = bits[order].tolist()
        blocks = [found[i : i + BLOCK] for i in range(0, len(found), BLOCK)]
        if any(len(set(block)) > 1 or len(block) < BLOCK or block[0] > MAX_WIDTH for block in blocks):
            raise AatcError(
                f"this plan's widths do not fill blocks of {BLOCK} channels with one width of at most {MAX_WIDTH} bits",
                "plan with a recipe that allocates by blocks, such as loss-aware-fused, or run without fused kernels",
            )
        places = torch.tensor(order, dtype=torch.int64, device=codec.bits.device)
        unit, offset = codec.units()
        channels = head * size + places
        rows = unit[channels, None] * codec.decode[head].index_select(0, places)
        return cls(places, tuple(block[0] for block in blocks), rows, offset[channels])


@dataclass(frozen=True)
class LayerTables:
    """Everything static of one layer, in the order the kernel reads it. H kv heads, D head dim, A = D channels.

    Rotary pairs come in J = D / 16 lots of 8: the first F are fast and reconstructed, the others slow and absorbed.
    widths int32 [H, 2, J]; offsets int32 [H + 1], bytes of a tile row before each head; matrix int8 in fragment order
    [H, F, D / 32, 32, 16]; start int32 [H, F, 4, 2, 4]; slow float16 in fragment order [H, J, J - F, 32, 8];
    code_offsets int32 [H, J, 4], offsets as bytes, doubled when ``halves`` is 1; pair_scale float32 [H, D / 2]; decode
    float16 [H, D, D]; value_offset float32 [H, D]; tile_bytes of all heads.
    """

    keys: tuple[HeadSide, ...]
    values: tuple[HeadSide, ...]
    widths: Tensor
    offsets: Tensor
    matrix: Tensor
    start: Tensor
    slow: Tensor
    code_offsets: Tensor
    pair_scale: Tensor
    decode: Tensor
    value_offset: Tensor
    fast: int
    halves: int
    tile_bytes: int

    @classmethod
    def of(cls, keys: list[HeadSide], values: list[HeadSide], dim: int, fast: int) -> LayerTables:
        """Tables of one layer from its heads' sides; ``dim`` D is 64, 96, 128 or 256, ``fast`` F as of `fast_pairs`."""
        device = keys[0].rows.device
        widths = torch.zeros(len(keys), 2, dim // BLOCK, dtype=torch.int32)
        sizes = []
        for head, pair in enumerate(zip(keys, values, strict=True)):
            for side, part in enumerate(pair):
                widths[head, side, : len(part.widths)] = torch.tensor(part.widths, dtype=torch.int32)
            sizes.append(sum(block_bytes(w) for part in pair for w in part.widths) + SCALE_BYTES)
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        integer = [_integer_rows(part.rows, dim) for part in keys]
        matrix = torch.stack([_fragments(rows, dim)[:fast] for rows, _ in integer])
        start = torch.stack([
            _starts(rows, part.offset, dim)[:fast] for (rows, _), part in zip(integer, keys, strict=True)
        ])  # fmt: skip
        halves = int(any(bool((part.offset % 1 != 0).any()) for part in keys))
        slow = [_slow_rows(part.rows, dim, fast) for part in keys]
        pair_scale = torch.stack([scale for _, scale in integer])
        pair_scale[:, 8 * fast :] = torch.stack([largest for _, largest in slow])[:, None] / 64
        decode = torch.zeros(len(values), dim, dim, dtype=torch.float32, device=device)
        value_offset = torch.zeros(len(values), dim, dtype=torch.float32, device=device)
        for head, part in enumerate(values):
            # the kernel's sums are of codes over 2^(width - first plane)
            below = torch.tensor([max(width - 2, 0) for width in part.widths], device=device).repeat_interleave(BLOCK)
            unit = torch.exp2(below.to(torch.float32))
            rows = (part.rows.to(torch.float32) * unit[:, None]).to(torch.float16)
            decode[head, : rows.shape[0]] = rows.to(torch.float32)
            value_offset[head] = (part.offset.to(torch.float32) / unit) @ rows.to(torch.float32)
        half = decode.to(torch.float16)
        return cls(
            tuple(keys), tuple(values), widths.to(device), offsets.to(device), matrix, start,
            torch.stack([rows for rows, _ in slow]),
            torch.stack([_offset_codes(part.offset, dim, halves) for part in keys]), pair_scale, half, value_offset,
            fast, halves, sum(sizes),
        )  # fmt: skip


def fast_pairs(frequencies: Tensor) -> int:
    """How many lots of 8 rotary pairs turn too far in 64 tokens to be absorbed with a slope: more than 0.1 rad.

    What is left out beyond the slope is half the square of that angle, so less than half a percent of a pair's part.
    """
    lots = (frequencies.to(torch.float64) * 64).view(-1, 8).amax(1)
    return max(1, int((lots > 0.1).sum()))


def _slow_rows(rows: Tensor, dim: int, fast: int) -> tuple[Tensor, Tensor]:
    """Rows of the slow pairs over their largest element, in the order of mma.m16n8k16's first operand.

    -> float16 [D / 16 (blocks), D / 16 - F (steps), 32, 8], and that element. Row 2 t + e of a block is channel 4 t + e
    and row 8 + 2 t + e channel 4 t + 2 + e, so that the transposed product has the channels of a code word together.
    """
    padded = torch.zeros(dim, dim, dtype=torch.float64, device=rows.device)
    padded[: rows.shape[0]] = rows.to(torch.float64)
    slow = torch.cat((padded[:, 8 * fast : dim // 2], padded[:, dim // 2 + 8 * fast :]), 1)
    largest = slow.abs().amax() if slow.numel() else torch.ones((), dtype=torch.float64, device=rows.device)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest)).to(torch.float32)
    lane, slot = torch.arange(LANES, device=rows.device), torch.arange(8, device=rows.device)
    row = (lane // 4)[:, None] + 8 * (slot // 2 % 2)
    channel = 4 * (row % 8 // 2) + row % 2 + 2 * (row // 8)
    steps = torch.arange(dim // BLOCK - fast, device=rows.device)[:, None, None]
    column = 8 * (fast + steps) + 2 * (lane % 4)[:, None] + slot % 2 + dim // 2 * (slot // 4)
    block = BLOCK * torch.arange(dim // BLOCK, device=rows.device)[:, None, None, None]
    picked = padded[block + channel, column.expand(dim // BLOCK, *column.shape)]
    return (picked / largest.to(torch.float64)).to(torch.float16), largest


def _offset_codes(offset: Tensor, dim: int, halves: int) -> Tensor:
    """Offsets (doubled when they are halves) as bytes, four channels a word. -> int32 [D / 16, 4]."""
    codes = torch.zeros(dim, dtype=torch.uint8, device=offset.device)
    codes[: offset.numel()] = (offset * (1 + halves)).to(torch.uint8)
    return codes.view(torch.int32).view(dim // BLOCK, 4)


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
