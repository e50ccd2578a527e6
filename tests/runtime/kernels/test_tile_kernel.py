"""The kernel of tiles with classes: records hold the packed codes, and under emulation it is its float64 twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tile_bytes import TileBytes
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_packing import TilePacking
from aatc_cli.core.tile_rule import TileRule
from aatc_cli.errors import AatcError
from aatc_cli.runtime.fused_tiles import forms
from aatc_cli.runtime.fused_tiles.digits import digits_of
from aatc_cli.runtime.fused_tiles.fields import Fields, Stored
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.reference import TileQuery, decode_attention
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels.angles import TileTurns, fast_lots
from aatc_cli.runtime.kernels.decode_tiles import TileCall, TileCounters
from aatc_cli.runtime.kernels.tile_shape import Launch, TileShape, TileSteps
from aatc_cli.runtime.tiles.layer import TileLayer

SINKS, RING = 4, 128
THREE = TileRule((32, 16, 16))


def codecs_of(heads: int, dim: int, bits: float, rule: TileRule, dropped: bool = False) -> dict[Side, TileCodec]:
    """Codecs of any widths up to 8; with ``dropped`` the first head keeps nothing of the lowest class.

    Those with ``dropped`` are about a mean.
    """
    found: dict[Side, TileCodec] = {}
    for place, side in enumerate(SIDES):
        generator = torch.Generator().manual_seed(place)
        matrix = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64))[0]
        variance = 0.5 + torch.rand(heads * dim, generator=generator, dtype=torch.float64)
        rise = 0.9 * (torch.arange(rule.classes)[:, None] - (rule.classes - 1) / 2)
        widths = 1.6 * torch.randn(rule.classes, heads * dim, generator=generator) + bits + rise
        widths = widths.round().clamp(0, 8).to(torch.int64)
        if dropped:
            widths[0, :dim] = 0
        codec = TransformCodec(
            matrix, matrix.mT.contiguous(), variance, widths[0], variance, "uniform", scale_bits=8, restored=0.5
        )
        if dropped:
            codec = replace(codec, centre=torch.randn(heads * dim, generator=generator, dtype=torch.float64))
        found[side] = TileCodec(codec, widths, rule).to("cpu", torch.float32)
    return found


@dataclass
class Case:
    """One layer with sequences of some lengths whose tiles lie anywhere in a pool, and a query of each."""

    layer: TileLayer
    shape: TileShape
    tables: TileTables
    data: list[Tensor]
    pool: Tensor
    counters: TileCounters
    query: TileQuery

    @classmethod
    def of(
        cls, heads: int, group: int, dim: int, lengths: list[int], bits: float, rule: TileRule, odd: bool, theta: float
    ) -> Case:
        """With ``odd``, biases of projections, codes about a mean and a head that drops the lowest class."""
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        codecs = codecs_of(heads, dim, bits, rule, odd)
        held = RecordTiles(codecs, rule, heads)
        biases: dict[Side, Tensor | None] = {side: normal(heads * dim) if odd else None for side in SIDES}
        layer = TileLayer(0, codecs, biases, rule, heads, held)
        tables = TileTables.of(codecs, held, biases)
        tiles = [max(0, -(-(length - SINKS - RING) // 64)) for length in lengths]
        data = []
        for count in tiles:
            rows: dict[Side, Tensor] = {side: normal(1, 64 * count, heads * dim) for side in SIDES}
            received = torch.rand(1, rule.orders(heads), 64 * count, generator=generator)
            data.append(layer.encode(rows, received, 0)[0] if count else torch.zeros(0, held.nbytes, dtype=torch.uint8))
        order = torch.randperm(max(sum(tiles), 1), generator=generator)
        pool = torch.full((order.numel(), held.nbytes), 255, dtype=torch.uint8)
        pages = torch.zeros(len(lengths), max(1, *tiles), dtype=torch.int32)
        start = 0
        for row, mine in enumerate(data):
            places = order[start : start + len(mine)]
            pool[places], pages[row, : len(mine)], start = mine, places.to(torch.int32), start + len(mine)
        counts = [torch.tensor(part, dtype=torch.int32) for part in (lengths, tiles)]
        exact = [normal(len(lengths), SINKS + RING, heads * dim) for _ in SIDES]
        query = TileQuery(
            normal(len(lengths), heads * group, dim),
            *exact,
            *counts,
            theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim),
            SINKS,
            SINKS,
            dim**-0.5,
            rule.lags(RING),
        )
        steps = fast_lots(query.frequencies), tables.steps, tables.stage_bytes
        shape = TileShape(
            len(lengths),
            heads,
            group,
            rule.classes,
            dim,
            SINKS + RING,
            SINKS,
            pages.shape[1],
            held.nbytes,
            *steps,
            tables.biased,
            query.lags,
            query.scaling,
        )
        return cls(layer, shape, tables, data, pool, TileCounters(*counts, pages), query)

    def attended(self, attend: Callable[..., Tensor], chunk: int) -> tuple[Tensor, Tensor]:
        """What the kernel gives, and what it adds to what exact slots received."""
        query, shape = self.query, self.shape
        received = torch.zeros(shape.batch, shape.kv_heads, shape.slots)
        turns = TileTurns.of(query.frequencies, SINKS, shape.max_tiles, RING)
        rows = query.keys, query.values
        call = TileCall(query.query, self.pool, self.tables, turns, rows, self.counters, received)
        return attend(shape, chunk, call), received


@pytest.mark.parametrize("rule", [THREE, TileRule((32, 16, 16), "layer"), TileRule((64,)), TileRule((16, 16, 16, 16))])
@pytest.mark.parametrize(("heads", "dim", "dropped"), [(2, 64, False), (3, 80, True)])
def test_records_hold_what_packed_tiles_hold(rule: TileRule, heads: int, dim: int, dropped: bool) -> None:
    codecs = codecs_of(heads, dim, 2.0, rule, dropped)
    packed, records = TilePacking(codecs, rule, heads), RecordTiles(codecs, rule, heads)
    generator = torch.Generator().manual_seed(0)
    latents = {side: torch.randn(2, 3, 64, heads * dim, generator=generator) for side in SIDES}
    classes = rule.classes_of(torch.rand(2, 3, rule.orders(heads), 64, generator=generator), 0, 0)
    data = records.pack(latents, classes)
    assert data.shape[-1] == records.nbytes
    expected, same = packed.unpack(packed.pack(latents, classes))
    found, ours = records.unpack(data)
    assert torch.equal(ours, same)
    assert all(torch.equal(found[side], expected[side]) for side in SIDES)
    # what records add to codes: places and empty slots
    assert records.nbytes < 1.05 * packed.nbytes + 64 * heads * rule.classes
    widths = {side: codecs[side].bits.view(rule.classes, heads, dim).numpy() for side in SIDES}
    law = TileBytes.of(widths, rule, heads, 8)
    ours_by_cause = records.bytes_by_cause(law)
    assert (law.total, ours_by_cause.total) == (packed.nbytes, records.nbytes)
    assert ours_by_cause.padding >= 0


@pytest.mark.parametrize("side", SIDES)
def test_digits_of_full_planes_leave_no_room(side: Side) -> None:
    """Sixteen digits of each size fill words, and some of two bits become half as many of four."""
    widths = [8] * 16 + [7] * 16 + [5] * 32 + [3] * 16 + [2] * 32 + [0] * 16
    fours, twos, ones = digits_of(widths, side)
    assert sum(part.nbytes for part in (fours, twos, ones)) * 8 == 16 * sum(widths)
    assert fours.count > 0
    assert fours.count % 16 == 0
    codes = torch.stack([torch.randint(2**w, (16,), generator=torch.Generator().manual_seed(w)) for w in widths], -1)
    digits = fours, twos, ones
    starts = accumulate((part.nbytes for part in digits[:2]), initial=0)
    record = torch.cat([part.pack(codes) for part in digits])
    held = Stored(0, len(record), list(zip(digits, starts, strict=True)))
    fields = Fields.of([[held]], (16,), len(widths), side)
    assert torch.equal(fields.codes(record)[:, 0], codes)


def test_levels_that_are_not_even_are_refused() -> None:
    codecs = codecs_of(1, 64, 2.0, THREE)
    lloyd = {
        side: TileCodec(replace(codec.codec, quantizer="lloyd"), codec.bits, THREE) for side, codec in codecs.items()
    }
    with pytest.raises(AatcError, match="evenly spaced"):
        TileTables.of(lloyd, RecordTiles(lloyd, THREE, 1), {"k": None, "v": None})


@pytest.mark.parametrize(
    ("heads", "group", "dim", "lengths", "bits", "rule", "odd"),
    [
        (1, 1, 64, [100], 2.0, THREE, False),
        (2, 4, 64, [700, 1, 1300, 132], 2.0, THREE, False),
        (1, 7, 128, [900], 2.0, THREE, True),
        (1, 16, 64, [600], 3.0, TileRule((32, 16, 16), "layer"), False),
        (2, 2, 80, [600, 130], 1.0, THREE, True),
        (1, 4, 256, [400], 2.0, THREE, False),
        (1, 5, 96, [600], 4.5, TileRule((16, 16, 16, 16)), False),
    ],
)
def test_the_kernel_is_its_twin(
    emulated: Callable[..., Tensor],
    heads: int,
    group: int,
    dim: int,
    lengths: list[int],
    bits: float,
    rule: TileRule,
    odd: bool,
) -> None:
    """Roundings to float16 are what differs: of levels, rows, sums, angles, queries and weights."""
    case = Case.of(heads, group, dim, lengths, bits, rule, odd, 1e4)
    expected, paid = decode_attention(case.layer, case.data, case.query, case.tables)
    found, received = case.attended(emulated, 8)
    for row in range(len(lengths)):
        error = (found[row] - expected[row]).square().mean().sqrt() / expected[row].square().mean().sqrt()
        assert error < 2e-3
    assert (received - paid).abs().max() <= 2e-3 * paid.abs().max()


def test_a_sequence_without_tokens_is_zero(emulated: Callable[..., Tensor]) -> None:
    """Rows that a captured batch has to spare: no numbers there would spread where a model looks at all rows."""
    case = Case.of(3, 3, 64, [700, 200, 133], 2.0, THREE, False, 1e4)
    expected = decode_attention(case.layer, case.data, case.query, case.tables)[0]
    case.counters.tokens[1] = case.counters.tiles[1] = 0
    found, received = case.attended(emulated, 8)
    assert not found[1].any()
    assert not received[1].any()
    assert (found[[0, 2]] - expected[[0, 2]]).square().mean().sqrt() < 2e-3 * expected[[0, 2]].square().mean().sqrt()


def test_one_form_holds_all_classes(emulated: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where layers have more forms than a kernel has code for: steps that a class lacks meet rows of zeros."""
    monkeypatch.setattr(forms, "_MOST_FORMS", 1)
    case = Case.of(1, 2, 64, [1100], 2.0, THREE, False, 1e4)
    assert (len(case.tables.steps.keys), len(case.tables.steps.values)) == (1, 1)
    expected = decode_attention(case.layer, case.data, case.query, case.tables)[0]
    found = case.attended(emulated, 8)[0]
    assert (found - expected).square().mean().sqrt() < 2e-3 * expected.square().mean().sqrt()


def test_sequences_do_not_depend_on_how_programs_share_them(emulated: Callable[..., Tensor]) -> None:
    case = Case.of(1, 2, 64, [1500], 2.0, THREE, False, 1e4)
    one, other = (case.attended(emulated, chunk)[0] for chunk in (8, 24))
    assert (one - other).abs().max() < 2e-3 * one.abs().max()


@pytest.mark.parametrize("near", [True, False])
def test_one_tile_under_way_is_enough(emulated: Callable[..., Tensor], near: bool) -> None:
    case = Case.of(1, 2, 64, [1500], 2.0, THREE, False, 1e4)
    expected = decode_attention(case.layer, case.data, case.query, case.tables)[0]
    # what wide heads of many bits leave room for
    case.shape.__dict__["_launch"] = Launch(4, 1, 1, near)
    found = case.attended(emulated, 8)[0]
    assert (found - expected).square().mean().sqrt() < 2e-3 * expected.square().mean().sqrt()


def test_shared_memory_is_that_of_a_multiprocessor() -> None:
    """Wide heads of many bits have room for fewer warps."""
    seen = set()
    for dim, group, steps, stage in (
        (64, 4, TileSteps(((1, 2, 2),), ((2, 2, 2),)), 1312),
        (128, 4, TileSteps(((3, 3, 2),), ((3, 3, 4),)), 2624),
        (128, 4, TileSteps(((4, 4, 4),), ((4, 4, 4),)), 3184),
        (128, 7, TileSteps(((3, 3, 2),), ((3, 3, 4),)), 2624),
        (256, 4, TileSteps(((5, 4, 2),), ((6, 6, 8),)), 6400),
    ):
        shape = TileShape(1, 1, group, 3, dim, 132, 4, 64, 4096, 4, steps, stage, False, (32, 64), 1.0)
        assert shape.shared_bytes(100) + 1024 <= 233_472
        seen.add(shape._launch[:3])
    assert seen == {(16, 2, 1), (12, 2, 1), (4, 2, 1)}
