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
        heads, size = tiles.heads, tiles.size
        records = [record for row in tiles.records for record in row]
        steps = {side: max(_steps(record, side)[0] for record in records) for side in SIDES}
        levels = _Levels({side: codecs[side].codec for side in SIDES})
        found: dict[str, list[Tensor]] = {name: [] for name in ("k", "v", "matrix", "channels", "scale", "bias")}
        facts = []
        spread = {side: codecs[side].codec.variance.sqrt().to(torch.float64).cpu() for side in SIDES}
        decode = {side: codecs[side].codec.decode.to(torch.float64).cpu() for side in SIDES}
        index = torch.arange(size) if order is None else order.cpu()
        bias = torch.zeros(heads, size, dtype=torch.float64)
        if biases["k"] is not None:
            bias = biases["k"].to(torch.float64).cpu().view(heads, size)
        for place, record in enumerate(records):
            head, k = divmod(place, tiles.rule.classes)
            mine = slice(head * size, (head + 1) * size)
            blocks = tiles.rule.quotas[k] // ROWS
            counts = [_steps(record, side) for side in SIDES]
            shape = (tiles.starts[head][k], record.nbytes, blocks)
            facts.append([*shape, counts[0][0], counts[1][0], counts[0][1], counts[1][1], 0])
            widths = {side: codecs[side].bits[k, mine].tolist() for side in SIDES}
            for side in SIDES:
                found[side].append(_descriptors(record, side, widths[side], steps[side], levels))
            rows = (spread["k"][mine, None] * decode["k"][head])[:, index]
            coded = torch.tensor(widths["k"]) > 0
            scale = _pair_scale(rows[coded], size)
            slots = torch.tensor(slot_channels(record.entities["k"], "k") + [-1] * ROWS * steps["k"])
            whole = torch.cat((rows / scale.repeat(2), torch.zeros(1, size)))[slots[: ROWS * steps["k"]]]
            found["matrix"].append(_columns(whole, size))
            found["scale"].append(scale)
            found["bias"].append(bias[head, index] / scale.repeat(2))
            channels = slot_channels(record.entities["v"], "v") + [-1] * ROWS * steps["v"]
            found["channels"].append(torch.tensor(channels[: ROWS * steps["v"]], dtype=torch.int32))
        device, lead = codecs["k"].codec.encode.device, (heads, tiles.rule.classes)
        whole_of = {name: torch.stack(parts).unflatten(0, lead) for name, parts in found.items()}
        out = spread["v"].view(heads, size, 1) * decode["v"]
        value_bias = torch.zeros(heads, size) if biases["v"] is None else biases["v"].view(heads, size)
        stage = max(tiles.rule.quotas[place % lead[1]] // ROWS * record.nbytes for place, record in enumerate(records))
        return cls(
            torch.tensor(facts, dtype=torch.int32).view(*lead, 8).to(device),
            whole_of["k"].to(device),
            whole_of["v"].to(device),
            levels.tensor().to(device),
            whole_of["matrix"].to(device, torch.float16),
            whole_of["channels"].to(device),
            whole_of["scale"].to(device, torch.float32),
            whole_of["bias"].to(device, torch.float16),
            out.to(device, torch.float16),
            value_bias.to(device, torch.float32).contiguous(),
            biases["k"] is not None,
            tiles.nbytes,
            max(stage, _ALIGNMENT),
        )

    @property
    def key_steps(self) -> int:
        """Most steps of keys of any class."""
        return int(self.key_descriptors.shape[2])

    @property
    def value_steps(self) -> int:
        """Most steps of values of any class."""
        return int(self.value_descriptors.shape[2])


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
