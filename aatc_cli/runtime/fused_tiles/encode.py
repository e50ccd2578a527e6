"""Packing of a layer's tiles by a kernel where it is compiled: tables of its codecs, and latents by torch before it.

Codes are those of `core.tile_codec` in float32, and the same latents are given to either, but sums go in another order:
where roundings decide, a token may find another scale (`evals.bench.undecided` tells such tokens from wrong ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Self

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.lloyd import Span, Tables
from aatc_cli.core.scales import pack_scales, scale_grid
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_sizes import TILE
from aatc_cli.models.adapter import debias
from aatc_cli.runtime.fused_tiles.digits import ROWS
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.sources import Sources
from aatc_cli.runtime.kernels.encode_tiles import EncodeCall, TileEncoder
from aatc_cli.runtime.kernels.parts import latents_by_parts, parts_of
from aatc_cli.runtime.tiles.layer import TileLayer

# tiles whose latents are there at once
_AT_ONCE = 512
_WORDS = 8


@dataclass(frozen=True)
class EncodeTables:
    """Static tensors of one layer, as ``encode_tiles.cu`` reads them. H kv heads, N classes, D head dim.

    class_of int32 [4]: the class of every 16 ranks. counts int32 [H, N, 2]: channels that are coded. Of each of them
    channels int32 [H, N, 2, 8, D]: as floats spread, centre, price and cells a unit; channel, first cell and number of
    cells less one, as a float the inverse of an even step, half of the levels. cells float32 [n, 2]: threshold and
    level below it; before uint8 [n]: thresholds of lower cells. scale_codes uint8 [2^15] by the bits of a float16,
    scales float32 [256]. entries, places, word_counts: `Sources`.
    """

    class_of: Tensor
    counts: Tensor
    channels: Tensor
    cells: Tensor
    before: Tensor
    scale_codes: Tensor
    scales: Tensor
    entries: Tensor
    places: Tensor
    word_counts: Tensor
    classes: int
    nbytes: int

    @classmethod
    def of(cls, tiles: RecordTiles) -> EncodeTables:
        """Of the codecs whose codes ``tiles`` packs, which are on the host."""
        rule, codecs = tiles.rule, {side: tiles.sides[side].codec for side in SIDES}
        cells = _Cells()
        shape = (tiles.heads, rule.classes, len(SIDES))
        channels = torch.zeros(*shape, tiles.size, _WORDS, dtype=torch.int32)
        counts = torch.zeros(shape, dtype=torch.int32)
        for place, side in enumerate(SIDES):
            for k in range(rule.classes):
                for head, rows in enumerate(_channels(codecs[side], k, tiles.heads, cells)):
                    counts[head, k, place] = len(rows)
                    channels[head, k, place, : len(rows)] = rows
        sources, host = Sources.of(tiles), counts.device
        edges, before = cells.tensors()
        return cls(
            rule.class_of_rank(host)[::ROWS].to(torch.int32),
            counts,
            channels.transpose(-2, -1).contiguous(),
            edges,
            before,
            _scale_codes(host),
            scale_grid(host).to(torch.float32),
            sources.entries,
            sources.places,
            sources.counts,
            rule.classes,
            tiles.nbytes,
        )

    def scaled(self, device: torch.device) -> EncodeTables:
        """The same, on a device, with the codes of scales as that device finds them: its logarithms are its own."""
        return replace(self, scale_codes=_scale_codes(device), scales=scale_grid(device).to(torch.float32))


class FusedTileLayer(TileLayer):
    """The codecs of one layer whose tiles are records; on a GPU a kernel makes them, from ``tables``."""

    tables: EncodeTables | None = None

    def by_kernel(self, tables: EncodeTables | None) -> Self:
        """The same layer, whose tiles the kernel makes from now on if there are ``tables``."""
        self.tables = tables
        return self

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile and make what the first tile of rows in ``dtype`` would wait for; nothing where no kernel packs."""
        if self.tables is not None:
            _ = self._encoder
            for side in SIDES:
                self.latents(side, torch.zeros(1, TILE, self.channels, dtype=dtype, device=self.device))

    def encode(self, rows: Mapping[Side, Tensor], received: Tensor, first: int) -> Tensor:
        """Tiles [b, m, n] of whole tiles of exact rows [b, m t, C], bias included; ``first`` counts packed tokens."""
        if self.tables is None:
            return super().encode(rows, received, first)
        if self.rule.ranked_by != "received":
            received = self.rule.classes_of(received, first, self.layer).to(torch.float32)
        orders = received.shape[1]
        by_tile = torch.unflatten(received, -1, (-1, TILE)).transpose(1, 2).reshape(-1, orders, TILE)
        out = torch.empty(by_tile.shape[0], self.held.nbytes, dtype=torch.uint8, device=self.device)
        flat = {side: rows[side].reshape(-1, TILE, self.channels) for side in SIDES}
        for start in range(0, by_tile.shape[0], _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            latents = {side: self.latents(side, flat[side][part]) for side in SIDES}
            call = EncodeCall(latents["k"], latents["v"], by_tile[part].contiguous(), self.tables)
            self._encoder(call, out[part])
        return out.view(received.shape[0], -1, self.held.nbytes)

    def latents(self, side: Side, rows: Tensor) -> Tensor:
        """Latents [n, 64, H, D] of exact rows [n, 64, C], as `TransformCodec.latents` has them but not copied."""
        codec = self.codecs[side].codec
        if self.biases[side] is None and rows.dtype == torch.bfloat16 and codec.encode.dtype == torch.float32:
            by_parts = latents_by_parts(torch.unflatten(rows, -1, (self.heads, -1)), self._parts[side])
            if by_parts is not None:
                return by_parts
        by_head = torch.unflatten(debias(rows, self.biases[side]).to(codec.encode.dtype), -1, (self.heads, -1))
        found: Tensor = torch.einsum("...ge,gef->...gf", by_head, codec.encode)
        return found

    @cached_property
    def _parts(self) -> dict[Side, Tensor]:
        return {side: parts_of(self.codecs[side].codec.encode) for side in SIDES}

    @cached_property
    def _encoder(self) -> TileEncoder:
        return TileEncoder(self.channels // self.heads, self.device)


class _Cells:
    """Cells of all widths and quantizers behind one another; the first has no threshold and the level zero."""

    def __init__(self) -> None:
        self.edges = [torch.tensor([torch.inf], dtype=torch.float32)]
        self.lows, self.counts = ([torch.zeros(1, dtype=torch.float32)] for _ in range(2))
        self.size = 1
        self.places: dict[tuple[int, bool], tuple[int, int, float]] = {}

    def place(self, span: Span) -> tuple[int, int, float]:
        """First cell of a span's width, the last one counted from it, and cells a unit."""
        key = (span.width, bool(span.step))
        if key not in self.places:
            edges, low = _magnitudes(span)
            per_one = _cells_a_unit(edges)
            index = torch.round(edges * per_one).to(torch.int64)
            last = int(index.max()) if len(edges) else 0
            edge = torch.full((last + 1,), torch.inf, dtype=torch.float32)
            edge[index] = edges
            count = torch.searchsorted(index, torch.arange(last + 1))
            self.places[key] = (self.size, last, per_one)
            self.edges.append(edge)
            self.lows.append(low[count])
            self.counts.append(count.to(torch.float32))
            self.size += last + 1
        return self.places[key]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All cells float32 [n, 2], and thresholds before each uint8 [n]; n is even."""
        cells = torch.stack((torch.cat(self.edges), torch.cat(self.lows)), -1)
        return cells, torch.cat(self.counts).to(torch.uint8)


def _magnitudes(span: Span) -> tuple[Tensor, Tensor]:
    """Thresholds above zero and the levels above zero of a span, float32."""
    half = 2 ** (span.width - 1)
    if span.step:
        places = torch.arange(half, dtype=torch.float32)
        return places[1:] * span.step, (places + 0.5) * span.step
    return span.thresholds[half:].float().cpu(), span.points[half:].float().cpu()


def _cells_a_unit(edges: Tensor) -> float:
    """The least power of two at which no two thresholds are in one cell; zero where one cell will do."""
    if len(edges) < 2:
        return 0.0
    per_one = 1.0
    while float((edges[1:] - edges[:-1]).min()) * per_one <= 1.0:
        per_one *= 2
    return per_one


def _channels(codec: TileCodec, k: int, heads: int, cells: _Cells) -> list[Tensor]:
    """Of every head what the kernel knows of the channels that class k codes: int32 [n, 8], by rising width."""
    made = codec.of_class(k)
    like = torch.ones(1, dtype=torch.float32)
    weight = torch.ones_like(made.variance) if made.weight is None else made.weight
    price, spread = weight * made.variance.sqrt().square(), made.variance.sqrt()
    centre = torch.zeros_like(spread) if made.centre is None else made.centre
    size, widths = spread.numel() // heads, made.bits.tolist()
    of_width = {width: _of_width(made, width, like, cells) for width in sorted(set(widths) - {0})}
    found = []
    for head in range(heads):
        coded = [c for c in range(head * size, (head + 1) * size) if widths[c]]
        mine = torch.tensor(sorted(coded, key=lambda c: widths[c]), dtype=torch.int64)
        facts = torch.tensor([of_width[widths[c]] for c in mine.tolist()], dtype=torch.float64).view(-1, 3)
        sizes = torch.where(spread[mine] > 0, spread[mine], torch.ones_like(spread[mine]))
        floats = torch.stack((sizes, centre[mine], price[mine], facts[:, 1].float(), facts[:, 2].float()), -1)
        words = floats.view(torch.int32)
        whole = torch.stack((mine - head * size, facts[:, 0].to(torch.int64)), -1).to(torch.int32)
        half = (1 << made.bits[mine].to(torch.int64) >> 1).to(torch.int32)
        found.append(torch.cat((words[:, :4], whole, words[:, 4:], half[:, None]), -1))
    return found


def _of_width(codec: TransformCodec, width: int, like: Tensor, cells: _Cells) -> tuple[int, float, float]:
    """First and last cell, cells a unit, and the inverse of an even step (or zero), of codes of ``width`` bits."""
    span = Tables.of(torch.tensor([width]), like, codec.quantizer == "uniform").spans[0]
    first, last, per_one = cells.place(span)
    # a GPU multiplies by the inverse in float32 where it is asked to divide by a number
    inverse = float(1 / torch.tensor(span.step, dtype=torch.float32)) if span.step else 0.0
    return first | last << 16, per_one, inverse


@lru_cache(maxsize=8)
def _scale_codes(device: torch.device) -> Tensor:
    """The code of every float16 that is not negative, by its bits: uint8 [2^15]. What is no number has code 0."""
    values = torch.arange(2**15, dtype=torch.int16).view(torch.float16).to(device)
    return pack_scales(values.nan_to_num(0.0, 65504.0))
