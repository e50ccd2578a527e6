"""What the kernel of tiles keeps of one layer besides tokens: facts of every class, matrices of keys, and the way out.

Codes are even levels, so a key of a class is linear in its digits: k = alpha sum_n (digit_n - middle_n) row_n, where
the row of digit n of channel c is 2^shift unit_c sigma_c B_c. Rows are e4m3 against one scale per rotary pair, which is
left to the query; those of digits of four bits, which only channels with many bits have, are sums of two e4m3. Values
stay sums of digits until the end, where they are put together as levels and meet sigma and the head's decode matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.artifacts.brought import ON_HOST
from aatc_cli.core import SIDES, Side, lloyd
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.runtime.fused_tiles.digits import ROWS, STEP, key_place, value_place
from aatc_cli.runtime.fused_tiles.forms import TileRoom, form_of
from aatc_cli.runtime.fused_tiles.limits import require_even
from aatc_cli.runtime.fused_tiles.records import Record, RecordTiles
from aatc_cli.runtime.kernels.tile_shape import TileSteps

_LARGEST, _KEY_UNIT, _VALUE_UNIT = 448.0, 2.0**-9, 2.0**-24
# digits of a channel at most
_DIGITS = 4


@dataclass(frozen=True)
class TileTables:
    """Static tensors of one layer, as ``tiles_sm90.cu`` reads them. H kv heads, N classes, D head dim, S steps.

    classes int32 [H, N, 16]: which form a class has, steps of its matrix of keys, where in a record keys of 2 and of 1
    bit begin, values of 4, 2 and 1, then where a class begins in a tile, bytes of a record, and row blocks.
    matrices uint8 (e4m3) [H, N, S, 2 D / 16, 2, 8, 16]: columns in lots of 8, halves of a step, columns, digits;
    digit_slots int32 and digit_weights float32 [H, N, D, 4], offsets float32 [H, N, D]: what makes a level of sums of
    digits of values; pair_scale float32 [H, N, D / 2]; key_bias float16 [H, N, D], in its units; decode float16
    [H, D, D]; value_bias float32 [H, D]. A bias is that of the projection and the mean that codes are about.
    key_rows: of every head and class float64 [n, D], rows of the digits as the matrices hold them, for the twin.
    """

    classes: Tensor
    matrices: Tensor
    digit_slots: Tensor
    digit_weights: Tensor
    offsets: Tensor
    pair_scale: Tensor
    key_bias: Tensor
    decode: Tensor
    value_bias: Tensor
    key_rows: tuple[Tensor, ...] = field(metadata=ON_HOST)
    steps: TileSteps
    biased: bool
    tile_bytes: int
    stage_bytes: int

    @classmethod
    def of(
        cls,
        codecs: Mapping[Side, TileCodec],
        tiles: RecordTiles,
        biases: Mapping[Side, Tensor | None],
        order: Tensor | None = None,
        room: TileRoom | None = None,
    ) -> TileTables:
        """Of the codecs of a layer whose tiles are ``tiles``, for a kernel that has ``room`` for those of others too.

        order [D]: the dimensions of a key as pairs (i, i + D / 2) that turn together; None where they lie so. Raises
        `AatcError` for levels that are not even.
        """
        require_even(codecs)
        biases = {side: codecs[side].codec.offset(biases[side]) for side in SIDES}
        places = torch.arange(tiles.size) if order is None else order.cpu()
        room = TileRoom.of([tiles]) if room is None else room
        made = _Made(codecs, tiles, biases["k"], places, room.steps)
        heads, size, classes = tiles.heads, tiles.size, tiles.rule.classes
        parts = [made.of_class(head, k) for head in range(heads) for k in range(classes)]
        whole = [torch.unflatten(torch.stack(part), 0, (heads, classes)) for part in zip(*parts, strict=True)]
        facts, matrices, slots, weights, offsets, scale, bias = whole
        device = codecs["k"].codec.encode.device
        out = made.spread["v"].view(heads, size, 1) * made.decode["v"]
        value_bias = (
            torch.zeros(heads, size, dtype=torch.float32) if biases["v"] is None else biases["v"].view(heads, size)
        )
        return cls(
            facts.to(device),
            matrices.to(device),
            slots.to(device),
            weights.to(device, torch.float32),
            offsets.to(device, torch.float32),
            scale.to(device, torch.float32),
            bias.to(device, torch.float16),
            out.to(device, torch.float16),
            value_bias.to(device, torch.float32).contiguous(),
            tuple(made.key_rows),
            made.steps,
            biases["k"] is not None,
            tiles.nbytes,
            room.stage_bytes,
        )


class _Made:
    """Makes the tables of one class after another, on the host."""

    def __init__(
        self, codecs: Mapping[Side, TileCodec], tiles: RecordTiles, bias: Tensor | None, order: Tensor, steps: TileSteps
    ) -> None:
        self.codecs, self.tiles, self.order, self.steps = codecs, tiles, order, steps
        self.bits = {side: codecs[side].bits.cpu() for side in SIDES}
        self.spread = {side: codecs[side].codec.variance.sqrt().to(torch.float64).cpu() for side in SIDES}
        self.decode = {side: codecs[side].codec.decode.to(torch.float64).cpu() for side in SIDES}
        none = torch.zeros(tiles.heads * tiles.size, dtype=torch.float32)
        self.bias = (none if bias is None else bias).to(torch.float64).cpu().view(tiles.heads, -1)
        self.key_rows: list[Tensor] = []

    def of_class(self, head: int, k: int) -> tuple[Tensor, ...]:
        """Of class k of a head what `TileTables` has of it, in the order in which it is taken apart there."""
        size, record = self.tiles.size, self.tiles.records[head][k]
        mine = slice(head * size, (head + 1) * size)
        widths = {side: self.bits[side][k, mine] for side in SIDES}
        unit = {side: _units(self.codecs[side].codec, widths[side]) for side in SIDES}
        rows = ((unit["k"] * self.spread["k"][mine])[:, None] * self.decode["k"][head])[:, self.order]
        fours = self.steps.keys[form_of(record, self.steps)][0]
        by_digit, place, counted = self._key_digits(record, rows)
        scale = _pair_scale(by_digit, size)
        held = by_digit / scale.repeat(2)
        high = held.to(torch.float32).to(torch.float8_e4m3fn)
        second = (held - high.to(torch.float64)).to(torch.float32).to(torch.float8_e4m3fn)
        slots = torch.zeros(STEP * self.steps.matrix, size, dtype=torch.uint8)
        four, between = place < STEP * fours, STEP * fours
        slots[place] = high.view(torch.uint8)
        slots[place[four] + between] = second.view(torch.uint8)[four]
        read = (high.to(torch.float64) + second.to(torch.float64) * four[:, None]) * counted[:, None]
        self.key_rows.append(read * scale.repeat(2))
        return (
            self._facts(record, head, k),
            _columns(slots, size),
            *self._value_digits(record, unit["v"], widths["v"]),
            scale / _KEY_UNIT,
            self.bias[head, self.order] / scale.repeat(2) * _KEY_UNIT,
        )

    def _key_digits(self, record: Record, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of n digits of keys: rows [n, D] as an operand meets them, places among all steps, and what they count."""
        channels, shares, places, counts = list[int](), list[float](), list[int](), list[int]()
        form = self.steps.keys[form_of(record, self.steps)]
        firsts = 0, 2 * form[0], 2 * form[0] + form[1]
        for part, first, steps in zip(record.digits["k"], firsts, form, strict=True):
            for digit, (channel, shift) in enumerate(zip(part.channels, part.shifts, strict=True)):
                step, row, counted = key_place(part.bits, digit, steps)
                channels.append(channel)
                shares.append(2.0**shift / counted)
                places.append(STEP * (first + step) + row)
                counts.append(counted)
        found = rows[torch.tensor(channels, dtype=torch.int64)] * torch.tensor(shares, dtype=rows.dtype)[:, None]
        return found, torch.tensor(places, dtype=torch.int64), torch.tensor(counts, dtype=torch.float64)

    def _value_digits(self, record: Record, unit: Tensor, widths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slots int32 and weights [E, 4] of the digits of every channel, and its offset [E]."""
        slots, shares = torch.zeros(2, unit.numel(), _DIGITS, dtype=torch.float64).tolist()
        filled, first = [0] * unit.numel(), 0
        for part, most in zip(record.digits["v"], self.steps.values[form_of(record, self.steps)], strict=True):
            for digit, (channel, shift) in enumerate(zip(part.channels, part.shifts, strict=True)):
                step, row, counted = value_place(part.bits, digit, most)
                slots[channel][filled[channel]] = STEP * (first + step) + row
                shares[channel][filled[channel]] = 2.0**shift / counted / _VALUE_UNIT
                filled[channel] += 1
            first += most
        weights = unit[:, None] * torch.tensor(shares, dtype=torch.float64)
        offsets = unit * (torch.exp2(widths.to(torch.float64)) - 1) / 2
        return torch.tensor(slots, dtype=torch.int32), weights, offsets

    def _facts(self, record: Record, head: int, k: int) -> Tensor:
        form = form_of(record, self.steps)
        forms = [form, self.steps.keys[form][0] + sum(self.steps.keys[form])]
        shape = [self.tiles.starts[head][k], record.nbytes, self.tiles.rule.quotas[k] // ROWS]
        return torch.tensor([*forms, *record.starts["k"][1:], *record.starts["v"], *shape, *[0] * 6], dtype=torch.int32)


def _units(codec: TransformCodec, widths: Tensor) -> Tensor:
    """What a step of the codes of channels with ``widths`` [E] is, for a channel of unit variance. -> float64 [E]."""
    like = torch.ones(widths.numel(), dtype=torch.float64)
    tables = lloyd.Tables.of(widths, like, True, codec.restored)
    none = torch.zeros(1, widths.numel(), dtype=torch.float64)
    return (tables.values(none + 1) - tables.values(none))[0]


def _pair_scale(rows: Tensor, size: int) -> Tensor:
    """What an e4m3 of one stands for in each rotary pair of rows [n, D]: [D / 2]."""
    if not rows.shape[0]:
        return torch.ones(size // 2, dtype=torch.float64)
    largest = rows.abs().amax(0).view(2, size // 2).amax(0)
    return torch.where(largest > 0, largest, torch.ones_like(largest)) / _LARGEST


def _columns(rows: Tensor, size: int) -> Tensor:
    """Rows [32 S, D] in the order of a warpgroup's product: [S, 2 D / 16, 2, 8, 16]."""
    first = torch.arange(size // 2).view(-1, 1, 8)
    columns = torch.cat((first, first + size // 2), 1).flatten()
    by_step = rows[:, columns].view(-1, 2, STEP // 2, 2 * (size // ROWS), 8)
    return by_step.permute(0, 3, 1, 4, 2)
