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
from aatc_cli.runtime.fused_tiles.slots import ROWS, Entity, code_index, per_step, slot_channels, wide_index

_NO_PART = 0xFFFF
_ALIGNMENT = 16


@dataclass(frozen=True)
class TileTables:
    """Static tensors of one layer, as ``tiles_sm90.cu`` reads them. H kv heads, N classes, D head dim, S steps.

    classes int32 [H, N, 8]: start in a tile, bytes of a record, row blocks, steps of keys and of values, and how many
    of them are wide. key_descriptors int32 [H, N, S, 4, 4], value_descriptors [H, N, S', 8, 4]; levels uint8; matrices
    float16 [H, N, S, 2 D / 16, 2, 8, 8]: columns in lots of 8, halves of a step, columns, slots; channels int32
    [H, N, 16 S']; pair_scale float32 [H, N, D / 2]; key_bias float16 [H, N, D], in its units; decode float16 [H, D, D];
    value_bias float32 [H, D].
    """

    classes: Tensor
    key_descriptors: Tensor
    value_descriptors: Tensor
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
        made = _Made(codecs, tiles, biases["k"], torch.arange(tiles.size) if order is None else order.cpu())
        heads, size, classes = tiles.heads, tiles.size, tiles.rule.classes
        parts = [made.of_class(head, k) for head in range(heads) for k in range(classes)]
        whole = [torch.stack(part).unflatten(0, (heads, classes)) for part in zip(*parts, strict=True)]
        facts, keys, values, matrices, channels, scale, bias = whole
        device = codecs["k"].codec.encode.device
        out = made.spread["v"].view(heads, size, 1) * made.decode["v"]
        value_bias = torch.zeros(heads, size) if biases["v"] is None else biases["v"].view(heads, size)
        return cls(
            facts.to(device),
            keys.to(device),
            values.to(device),
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
        self.most = {side: max(_steps(record, side)[0] for record in records) for side in SIDES}

    def of_class(self, head: int, k: int) -> tuple[Tensor, ...]:
        """Facts, descriptors of keys and values, matrix, channels, pair scale and key bias of class k of a head."""
        size, record = self.tiles.size, self.tiles.records[head][k]
        mine = slice(head * size, (head + 1) * size)
        widths = {side: self.codecs[side].bits[k, mine].tolist() for side in SIDES}
        rows = (self.spread["k"][mine, None] * self.decode["k"][head])[:, self.order]
        scale = _pair_scale(rows[torch.tensor(widths["k"]) > 0], size)
        slots = {side: self._slots(record, side) for side in SIDES}
        by_slot = torch.cat((rows / scale.repeat(2), torch.zeros(1, size)))[slots["k"]]
        keys, values = _steps(record, "k"), _steps(record, "v")
        shape = [self.tiles.starts[head][k], record.nbytes, self.tiles.rule.quotas[k] // ROWS]
        return (
            torch.tensor([*shape, keys[0], values[0], keys[1], values[1], 0], dtype=torch.int32),
            *(_descriptors(record, side, widths[side], self.most[side], self.levels) for side in SIDES),
            _columns(by_slot, size),
            slots["v"].to(torch.int32),
            scale,
            self.bias[head, self.order] / scale.repeat(2),
        )

    def _slots(self, record: Record, side: Side) -> Tensor:
        """Channels of the slots of as many steps as any class has, -1 where there is none."""
        count = ROWS * self.most[side]
        return torch.tensor((slot_channels(record.entities[side], side) + [-1] * count)[:count], dtype=torch.int64)


class _Levels:
    """Tables of levels by side, code width and the width a code is stored at; what is equal lies once."""

    def __init__(self, codecs: Mapping[Side, TransformCodec]) -> None:
        self.codecs = codecs
        # nothing at all, for empty slots
        self.data = [torch.zeros(_ALIGNMENT, dtype=torch.uint8)]
        self.size = _ALIGNMENT
        self.places: dict[tuple[Side, int, int, bool], int] = {}

    def place(self, side: Side, width: int, stored: int, wide: bool) -> int:
        """Byte at which the table of codes of ``width`` bits stored at ``stored`` begins, of a wide step or another."""
        if not width:
            return 0
        key = (side, width, stored, wide)
        if key not in self.places:
            self.places[key] = self.size
            index = (wide_index if wide else code_index)(torch.arange(2**width), stored)
            table = torch.zeros(max(8, int(index.max()) + 1), dtype=torch.float16)
            table[index] = _values(self.codecs[side], width).to(torch.float16)
            raw = table.view(torch.uint8)
            # low bytes and then high ones, where a byte is picked at a time
            raw = raw if wide else raw.view(8, 2).T.flatten()
            self.data.append(torch.nn.functional.pad(raw, (0, -raw.numel() % _ALIGNMENT)))
            self.size += self.data[-1].numel()
        return self.places[key]

    def tensor(self) -> Tensor:
        """All tables behind one another."""
        return torch.cat(self.data)


def _values(codec: TransformCodec, width: int) -> Tensor:
    """Levels [2^width] that codes of ``width`` bits are read as, for a channel of unit variance."""
    like = torch.ones(1, dtype=torch.float64)
    tables = lloyd.Tables.of(torch.tensor([width]), like, codec.quantizer == "uniform", codec.restored)
    return tables.values(torch.arange(2**width, dtype=torch.float64)[:, None])[:, 0]


def _steps(record: Record, side: Side) -> tuple[int, int]:
    """Steps of sixteen slots, and how many of them, all in front and two by two, are read as wide ones."""
    each, entities = per_step(side), record.entities[side]
    return -(-len(entities) // each), 2 * -(-sum(entity.wide for entity in entities) // (2 * each))


def _descriptors(record: Record, side: Side, widths: list[int], steps: int, levels: _Levels) -> Tensor:
    """Descriptors int32 [steps, entities of a step, 4]: where a lane finds parts and levels."""
    each = per_step(side)
    wide = _steps(record, side)[1]
    words = torch.full((steps * each, 8), _NO_PART, dtype=torch.int64)
    words[:, 4:] = 0
    for place, entity in enumerate(record.entities[side]):
        words[place, 4:] = torch.tensor(_tables_of(entity, side, widths, place // each < wide, levels))
    for part in record.parts[side]:
        field = {4: 0 if part.shift == 0 else 3, 2: 1, 1: 2}[part.bits]
        words[part.entity, field] = part.at
    packed = words[:, 0::2] | words[:, 1::2] << 16
    return packed.to(torch.int32).view(steps, each, 4)


def _tables_of(entity: Entity, side: Side, widths: list[int], wide: bool, levels: _Levels) -> list[int]:
    """Places of the tables of an entity's channels."""
    places = [levels.place(side, widths[c], entity.width, wide) if c >= 0 else 0 for c in entity.channels]
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
