"""What the kernel of tiles keeps of one layer besides tokens: facts of every class, matrices, levels, and the way out.

Keys of a class of a kv head are k = alpha sum_c level_c sigma_c B_c; rows sigma_c B_c are float16 against one scale per
rotary pair, which is left to the query. Values stay sums of levels until the end; sigma and the decode matrix of the
head are applied once to all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side, lloyd
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.runtime.fused_tiles.records import Record, RecordTiles
from aatc_cli.runtime.fused_tiles.slots import FOUR, ROWS, Entity, per_step, slot_channels, stored, wide_index

_NO_PART = 0xFFFF
_ALIGNMENT = 16


@dataclass(frozen=True)
class TileTables:
    """Static tensors of one layer, as ``tiles_sm90.cu`` reads them. H kv heads, N classes, D head dim, S steps.

    classes int32 [H, N, 16]: start in a tile, bytes of a record, row blocks, and of keys and values how many steps are
    wide, wide or of four bits, and all, then which have single bits. key_descriptors int32 [H, N, S, 4, 4] and
    value_descriptors [H, N, S', 8, 4] of wide steps, key_lanes and value_lanes [H, N, S, 32, 2] of others; levels
    uint8; matrices float16 [H, N, S, 2 D / 16, 2, 8, 8]: columns in lots of 8, halves of a step, columns, slots;
    channels int32 [H, N, 16 S']; pair_scale float32 [H, N, D / 2]; key_bias float16 [H, N, D], in its units; decode
    float16 [H, D, D]; value_bias float32 [H, D]. A bias is that of the projection and the mean that codes are about.
    """

    classes: Tensor
    key_descriptors: Tensor
    value_descriptors: Tensor
    key_lanes: Tensor
    value_lanes: Tensor
    levels: Tensor
    matrices: Tensor
    channels: Tensor
    pair_scale: Tensor
    key_bias: Tensor
    decode: Tensor
    value_bias: Tensor
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
    ) -> TileTables:
        """Of the codecs of a layer whose tiles are ``tiles``.

        order [D]: the dimensions of a key as pairs (i, i + D / 2) that turn together; None where they lie so.
        """
        biases = {side: codecs[side].codec.offset(biases[side]) for side in SIDES}
        made = _Made(codecs, tiles, biases["k"], torch.arange(tiles.size) if order is None else order.cpu())
        heads, size, classes = tiles.heads, tiles.size, tiles.rule.classes
        parts = [made.of_class(head, k) for head in range(heads) for k in range(classes)]
        whole = [torch.unflatten(torch.stack(part), 0, (heads, classes)) for part in zip(*parts, strict=True)]
        facts, keys, values, key_lanes, value_lanes, matrices, channels, scale, bias = whole
        device = codecs["k"].codec.encode.device
        out = made.spread["v"].view(heads, size, 1) * made.decode["v"]
        value_bias = torch.zeros(heads, size) if biases["v"] is None else biases["v"].view(heads, size)
        return cls(
            facts.to(device),
            keys.to(device),
            values.to(device),
            key_lanes.to(device),
            value_lanes.to(device),
            made.levels.tensor().to(device),
            matrices.to(device, torch.float16),
            channels.to(device),
            scale.to(device, torch.float32),
            bias.to(device, torch.float16),
            out.to(device, torch.float16),
            value_bias.to(device, torch.float32).contiguous(),
            biases["k"] is not None,
            tiles.nbytes,
            max(_ALIGNMENT, int((facts[..., 1] * facts[..., 2]).max())),
        )

    @property
    def key_steps(self) -> int:
        """Most steps of keys of any class."""
        return int(self.key_descriptors.shape[2])

    @property
    def value_steps(self) -> int:
        """Most steps of values of any class."""
        return int(self.value_descriptors.shape[2])


class _Made:
    """Makes the tables of one class after another, on the host; levels are common to all of them."""

    def __init__(
        self, codecs: Mapping[Side, TileCodec], tiles: RecordTiles, bias: Tensor | None, order: Tensor
    ) -> None:
        self.codecs, self.tiles, self.order = codecs, tiles, order
        self.levels = _Levels({side: codecs[side].codec for side in SIDES})
        self.spread = {side: codecs[side].codec.variance.sqrt().to(torch.float64).cpu() for side in SIDES}
        self.decode = {side: codecs[side].codec.decode.to(torch.float64).cpu() for side in SIDES}
        none = torch.zeros(tiles.heads * tiles.size)
        self.bias = (none if bias is None else bias).to(torch.float64).cpu().view(tiles.heads, -1)
        records = [record for row in tiles.records for record in row]
        self.most = {side: max(record.steps[side].count for record in records) for side in SIDES}

    def of_class(self, head: int, k: int) -> tuple[Tensor, ...]:
        """Of class k of a head: facts, descriptors and lanes' words by side, matrix, channels, pair scale, key bias."""
        size, record = self.tiles.size, self.tiles.records[head][k]
        mine = slice(head * size, (head + 1) * size)
        rows = (self.spread["k"][mine, None] * self.decode["k"][head])[:, self.order]
        scale = _pair_scale(rows[self.codecs["k"].bits[k, mine].cpu() > 0], size)
        slots = {side: self._slots(record, side) for side in SIDES}
        by_slot = torch.cat((rows / scale.repeat(2), torch.zeros(1, size)))[slots["k"]]
        shape = [self.tiles.starts[head][k], record.nbytes, self.tiles.rule.quotas[k] // ROWS]
        return (
            torch.tensor([*shape, *_facts(record), *[0] * 5], dtype=torch.int32),
            *(_descriptors(record, side, self.most[side], self.levels) for side in SIDES),
            *(_lane_words(record, side, self.most[side], self.levels) for side in SIDES),
            _columns(by_slot, size),
            slots["v"].to(torch.int32),
            scale,
            self.bias[head, self.order] / scale.repeat(2),
        )

    def _slots(self, record: Record, side: Side) -> Tensor:
        """Channels of the slots of as many steps as any class has, -1 where there is none."""
        count = ROWS * self.most[side]
        return torch.tensor(
            (slot_channels(record.steps[side].entities, side) + [-1] * count)[:count], dtype=torch.int64
        )


class _Levels:
    """Tables of levels by side, code width, width a code is stored at and kind of step; what is equal lies once."""

    def __init__(self, codecs: Mapping[Side, TransformCodec]) -> None:
        self.codecs = codecs
        # nothing at all, for empty slots
        self.data = [torch.zeros(_ALIGNMENT, dtype=torch.uint8)]
        self.size = _ALIGNMENT
        self.places: dict[tuple[Side, int, int, bool], int] = {}

    def place(self, side: Side, width: int, at: int, wide: bool) -> int:
        """Byte at which the table of codes of ``width`` bits stored at ``at`` begins, of a wide step or another."""
        if not width:
            return 0
        key = (side, width, at, wide)
        if key not in self.places:
            self.places[key] = self.size
            levels = _values(self.codecs[side], width).to(torch.float16)
            raw = _wide_table(levels, width, at) if wide else _small_table(levels, width, at)
            self.data.append(torch.nn.functional.pad(raw, (0, -raw.numel() % _ALIGNMENT)))
            self.size += self.data[-1].numel()
        return self.places[key]

    def tensor(self) -> Tensor:
        """All tables behind one another."""
        return torch.cat(self.data)


def _wide_table(levels: Tensor, width: int, at: int) -> Tensor:
    """Levels by `wide_index`, as bytes."""
    every = torch.full((2**width,), width), torch.full((2**width,), at)
    index = wide_index(stored(torch.arange(2**width), *every), at)
    table = torch.zeros(int(index.max()) + 1, dtype=torch.float16)
    table[index] = levels
    return table.view(torch.uint8)


def _small_table(levels: Tensor, width: int, at: int) -> Tensor:
    """Eight levels, low bytes and then high ones: magnitudes of what is stored at four bits, else levels by code.

    A code is read from a part of two bits and, above it, one of a single bit; bits of a part that is not there may be
    anything, so every place has a level. A single bit is above two that are not there.
    """
    count = 2**width
    if at == FOUR:
        index = torch.arange(8).clamp(max=count // 2 - 1) + count // 2
    else:
        index = torch.arange(8) >> 2 if at == 1 else torch.arange(8) & (2**at - 1)
    return levels[index.clamp(max=count - 1)].view(torch.uint8).view(8, 2).T.flatten()


def _values(codec: TransformCodec, width: int) -> Tensor:
    """Levels [2^width] that codes of ``width`` bits are read as, for a channel of unit variance."""
    like = torch.ones(1, dtype=torch.float64)
    tables = lloyd.Tables.of(torch.tensor([width]), like, codec.quantizer == "uniform", codec.restored)
    return tables.values(torch.arange(2**width, dtype=torch.float64)[:, None])[:, 0]


def _facts(record: Record) -> list[int]:
    """Of keys and values: steps that are wide, wide or of four bits, and all; then which have a part of one bit."""
    found, ones = [], []
    for side in SIDES:
        steps = record.steps[side]
        found += [steps.wide, steps.wide + steps.four, steps.count]
        mask = 0
        for part in record.parts[side]:
            mask |= (part.bits == 1) << part.entity // per_step(side)
        ones.append(mask)
    return [*found, *ones]


def _descriptors(record: Record, side: Side, most: int, levels: _Levels) -> Tensor:
    """Descriptors int32 [most, entities of a step, 4]: where a lane of a wide step finds parts and levels."""
    each, steps = per_step(side), record.steps[side]
    words = torch.full((most * each, 8), _NO_PART, dtype=torch.int64)
    words[:, 4:] = 0
    for place, entity in enumerate(steps.entities[: steps.wide * each]):
        words[place, 4:] = torch.tensor(_tables_of(entity, side, True, levels))
    for part in record.parts[side]:
        words[part.entity, {4: 0 if part.shift == 0 else 3, 2: 1, 1: 2}[part.bits]] = part.at
    return (words[:, 0::2] | words[:, 1::2] << 16).to(torch.int32).view(most, each, 4)


def _lane_words(record: Record, side: Side, most: int, levels: _Levels) -> Tensor:
    """Of steps that are not wide int32 [most, 32, 2]: a lane's byte of its first part and of the bits, two tables.

    Where a part is not there a lane reads what it likes.
    """
    each, steps = per_step(side), record.steps[side]
    words = torch.zeros(most * each, 4, dtype=torch.int64)
    for place, entity in enumerate(steps.entities):
        if place >= steps.wide * each:
            tables = _tables_of(entity, side, False, levels)
            words[place, 2:] = torch.tensor(tables[:1] * 2 if side == "k" else tables[:2])
    lane = torch.arange(32)
    shared, entity_of = (lane // 4, lane % 4) if side == "k" else (lane % 4, lane // 4)
    by_lane = words.view(most, each, 4)[:, entity_of].clone()
    for part in record.parts[side]:
        step, owner = divmod(part.entity, each)
        if step >= steps.wide:
            mine = entity_of == owner
            by_lane[step, mine, int(part.bits == 1)] = part.at + part.bits * shared[mine]
    return (by_lane[..., 0::2] | by_lane[..., 1::2] << 16).to(torch.int32)


def _tables_of(entity: Entity, side: Side, wide: bool, levels: _Levels) -> list[int]:
    """Places of the tables of an entity's slots."""
    places = [levels.place(side, width, entity.width, wide) for width in entity.widths]
    return [*places, 0, 0][:4]


def _pair_scale(rows: Tensor, size: int) -> Tensor:
    """The largest number of every rotary pair of rows [n, D], one where there is none: [D / 2]."""
    if not rows.shape[0]:
        return torch.ones(size // 2, dtype=torch.float64)
    largest = rows.abs().amax(0).view(2, size // 2).amax(0)
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def _columns(rows: Tensor, size: int) -> Tensor:
    """Rows [16 S, D] in the order of a warpgroup's product: [S, 2 D / 16, 2, 8, 8]."""
    first = torch.arange(size // 2).view(-1, 1, 8)
    columns = torch.cat((first, first + size // 2), 1).flatten()
    by_step = rows[:, columns].view(-1, 2, 8, 2 * (size // ROWS), 8)
    return by_step.permute(0, 3, 1, 4, 2)
