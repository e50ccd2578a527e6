"""Integer codes as bytes and back, at widths 0 to 16 per channel; `core.layout` says how many bytes that is.

A width is a sum of the power-of-two planes 16, 8, 4, 2, 1, and a code is cut into them from its highest bits down:
width 6 is a 4-bit field above a 2-bit field. Channels with bits are sorted widest first, so every width is one run of
channels and every plane a dense rectangle over a few such runs; no code straddles a byte, nothing is masked. Channels
without bits are not there at all. Keys are packed along channels, one row per token; values along the tokens of a
flush block, one run of bytes per channel.

Unpacking turns the bytes round first, so that tokens are neighbours, and then works on words of four of them: a field
is moved to the top of its byte, where codes of every width up to 8 are signed bytes times the same power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.pack_plan import PackPlan, Section, field_bytes
from aatc_cli.core.site_widths import PLANES

# tokens that are unpacked as one word
_WORD = 4


def pack_keys(codes: Tensor, plan: PackPlan) -> Tensor:
    """Codes [..., C] (int32, signed as `core.quantizer` makes them) as bytes along channels: uint8 [..., row_bytes]."""
    fields = _split(codes, plan)
    parts = [_pack_fields(torch.cat(fields[plane], -1), plane) for plane in PLANES if fields[plane]]
    return torch.cat(parts, -1) if parts else codes.new_empty((*codes.shape[:-1], 0), dtype=torch.uint8)


def unpack_keys(data: Tensor, plan: PackPlan, dtype: torch.dtype = torch.int32) -> Tensor:
    """Inverse of `pack_keys`: signed codes of the channels with bits, in sorted order. [..., row_bytes] -> [..., A]."""
    rows = data.flatten(0, -2)
    codes = _whole_codes(unpack_aligned(rows[None], plan, "k"), plan)[:, 0, : rows.shape[0]]
    return codes.T.reshape(*data.shape[:-1], -1 if codes.numel() else codes.shape[0]).to(dtype)


def pack_values(codes: Tensor, plan: PackPlan) -> Tensor:
    """Codes of whole blocks [..., f, C] as bytes along tokens, channel after channel: uint8 [..., block_bytes]."""
    fields = _split(codes, plan)
    parts = [
        _pack_fields(torch.cat(fields[plane], -1).transpose(-1, -2), plane).flatten(-2)
        for plane in PLANES
        if fields[plane]
    ]
    return torch.cat(parts, -1) if parts else codes.new_empty((*codes.shape[:-2], 0), dtype=torch.uint8)


def unpack_values(data: Tensor, plan: PackPlan, dtype: torch.dtype = torch.int32) -> Tensor:
    """Inverse of `pack_values`, with channels before tokens: [..., block_bytes] -> [..., A, f]."""
    blocks = data.flatten(0, -2)
    codes = _whole_codes(unpack_aligned(blocks[None], plan, "v"), plan)[..., : blocks.shape[0]]
    return codes.permute(2, 0, 1).reshape(*data.shape[:-1], *codes.shape[:2]).to(dtype)


def unpack_aligned(data: Tensor, plan: PackPlan, side: Side) -> tuple[Tensor, Tensor]:
    """Codes as bytes in which every width has its highest bit on top, tokens last: the form that decoding reads.

    data: packed keys [b, n, row_bytes], then f' = 1, or packed values [b, n, block_bytes], then f' = f tokens of n
    blocks. -> high int8 [b, A, f', m] and low uint8 [b, W, f', m], W being `PackPlan.wide`: a code of b bits is
    (high + low / 256) 2^(b - 8). m is n made a multiple of 4; what is beyond n belongs to no token.
    """
    columns, batch, active = _turned(data), data.shape[0], int(plan.order.shape[0])
    run = 1 if side == "k" else plan.flush
    shape = (batch, active + plan.wide, run, columns.shape[2])
    out = torch.empty(shape, dtype=torch.uint8, device=data.device)
    words, turned = out.view(torch.int32), columns.view(torch.int32)
    for section in plan.key_sections if side == "k" else plan.value_sections:
        count, bytes_ = section.count, slice(section.start, section.stop)
        if section.plane == 16:
            pairs = torch.unflatten(columns[:, bytes_], 1, (count, run, 2))
            out[:, :count], out[:, active : active + count] = pairs[:, :, :, 1], pairs[:, :, :, 0]
        elif side == "k":
            _place(_fields(turned[:, None, bytes_], section, count).transpose(1, 2), section, words)
        else:
            _place(_fields(torch.unflatten(turned[:, bytes_], 1, (count, -1)), section, run), section, words)
    # codes are stored with half their range added, which is their highest bit turned over
    words[:, :active] ^= _repeated(0x80)
    return out[:, :active].view(torch.int8), out[:, active:]


def _split(codes: Tensor, plan: PackPlan) -> dict[int, list[Tensor]]:
    """Unsigned fields of every plane, one tensor per width class, channels on the last axis."""
    ordered = codes.index_select(-1, plan.order)
    fields: dict[int, list[Tensor]] = {plane: [] for plane in PLANES}
    for run in plan.classes:
        unsigned = ordered[..., run.start : run.stop] + (1 << (run.width - 1))
        for plane in PLANES:
            if run.width & plane:
                fields[plane].append((unsigned >> _shift(run.width, plane)) & ((1 << plane) - 1))
    return fields


def _turned(data: Tensor) -> Tensor:
    """Bytes [b, n, m] with the n tokens or blocks last, made a multiple of a word: [b, m, n']."""
    batch, count, size = data.shape
    padding = -count % _WORD
    make = data.new_zeros if padding else data.new_empty
    out = make(batch, size, count + padding)
    out[..., :count].copy_(data.transpose(1, 2))
    return out


def _fields(words: Tensor, section: Section, count: int) -> Tensor:
    """Words [b, r, m, n / 4] of r runs as ``count`` fields each: int32 [b, r, count, n / 4]."""
    if section.plane == 8:
        return words
    fields = (words[:, :, None] >> section.places).bitwise_and_(_repeated((1 << section.plane) - 1))
    return fields.flatten(2, 3)[:, :, :count]


def _place(fields: Tensor, section: Section, words: Tensor) -> None:
    """Put fields [b, n, f', n / 4] into the words of their channels."""
    if section.plane < 8:
        fields.bitwise_left_shift_(section.shift)
    for source, target, count, first in section.runs:
        part, goal = fields[:, source : source + count], words[:, target : target + count]
        if first:
            goal.copy_(part)
        else:
            goal.bitwise_or_(part)


def _repeated(byte: int) -> int:
    """A signed 32-bit number with ``byte`` in each of its bytes."""
    number = byte * 0x01010101
    return number - (1 << 32) if number >= 1 << 31 else number


def _whole_codes(aligned: tuple[Tensor, Tensor], plan: PackPlan) -> Tensor:
    """Signed codes int32 [A, f', n] of `unpack_aligned` for a batch of one."""
    high, low = (part[0] for part in aligned)
    codes = high.to(torch.int32) * 256
    codes[: plan.wide] += low
    return codes >> (16 - plan.widths)[:, None, None]


def _shift(width: int, plane: int) -> int:
    """Bits of a code below its field of ``plane``: what is left of the width in smaller planes."""
    return width & (plane - 1)


def _pack_fields(values: Tensor, plane: int) -> Tensor:
    """Fields [..., n] as bytes: with m bytes, entry i is in byte i mod m at bit plane * (i div m). 16: little endian.

    Entries of one field position are thus neighbours, and a field is read as one slice with one shift.
    """
    if plane == 16:
        return torch.stack((values & 255, values >> 8), -1).flatten(-2).to(torch.uint8)
    size = field_bytes(values.shape[-1], plane)
    padded = torch.nn.functional.pad(values, (0, size * (8 // plane) - values.shape[-1]))
    data = padded[..., :size].clone()
    for place in range(1, 8 // plane):
        data |= padded[..., place * size : (place + 1) * size] << (plane * place)
    return data.to(torch.uint8)
