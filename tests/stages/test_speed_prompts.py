"""aatc eval speed of prompts and ragged sequences, with stand-ins for a GPU: what is checked, written and refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.bench import geometry as speed_geometry
from aatc_cli.evals.bench import packing, prompts, ragged
from aatc_cli.evals.bench import undecided as checks
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.geometry import Form, measure_geometry
from aatc_cli.evals.bench.packing import like_coded
from aatc_cli.evals.bench.tile_plan import RULE, synthetic_codecs
from aatc_cli.evals.bench.undecided import undecided
from aatc_cli.evals.speed.measure import _check_alone
from aatc_cli.evals.speed.settings import Settings
from aatc_cli.evals.speed.table import speed_table
from aatc_cli.evals.subjects import EvalOptions
from aatc_cli.models import random
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.tiles.layer import TileLayer
from tests.stages.test_speed_geometry import profile_of

GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=64, hidden_size=256)
PROFILE = profile_of(GEOMETRY)
CPU = torch.device("cpu")
CUDA = EvalOptions(device="cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is the CPU."""
    for name, value in {
        "fused_available": lambda: True,
        "on_hopper": lambda device: True,
        "device_name": lambda device: "a GPU",
        "torch": SimpleNamespace(device=lambda name: CPU, get_num_threads=lambda: 1),
    }.items():
        monkeypatch.setattr(speed_geometry, name, value)
    monkeypatch.setattr(packing, "_seconds", lambda call: call() is None or 0.25)
    monkeypatch.setattr(prompts, "start_over", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.mark.usefixtures("machine")
def test_prompts_have_rows_of_packing_and_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "_VOCABULARY", 1000)
    result = measure_geometry(PROFILE, 2.0, [(320, 1)], 1, CUDA, Form(tiles=True, prompts=True))
    assert [(row.part, row.backend) for row in result.rows] == [
        ("packing", "torch"),
        ("packing", "fused-tiles"),
        ("prefill", "uncompressed"),
        ("prefill", "fused-tiles"),
    ]
    # bfloat16 keys and values of 320 tokens of two heads of 64, in a quarter of a second
    assert result.rows[0].bytes_moved == 320 * 2 * 128 * 2
    assert result.rows[0].gigabytes_per_second == pytest.approx(320 * 512 / 0.25 / 1e9)
    assert [(check.backend, check.error) for check in result.checks] == [("packing", 0.0)]
    assert "GB / s" in speed_table([result]).columns


@pytest.mark.usefixtures("machine")
def test_packing_alone_has_no_model() -> None:
    result = measure_geometry(PROFILE, 2.0, [(320, 1), (640, 2)], 1, CUDA, Form(tiles=True, packing=True))
    assert [(row.part, row.backend, row.context, row.batch) for row in result.rows] == [
        ("packing", backend, *size) for size in ((320, 1), (640, 2)) for backend in ("torch", "fused-tiles")
    ]
    assert [check.error for check in result.checks] == [0.0, 0.0]


def packed_twice() -> tuple[RecordTiles, dict[Any, torch.Tensor], torch.Tensor]:
    codecs = synthetic_codecs(GEOMETRY, 2.0, CPU)
    held = RecordTiles(codecs, RULE, 2)
    generator = torch.Generator().manual_seed(3)
    rows = {side: like_coded(codecs[side], 128, 2, generator) for side in SIDES}
    received = torch.rand(1, RULE.orders(2), 128, generator=generator)
    layer = TileLayer(0, codecs, {"k": None, "v": None}, RULE, 2, held)
    return held, rows, layer.encode(rows, received, 0)


def test_codes_may_differ_where_rounding_decides_and_nowhere_else() -> None:
    held, rows, tiles = packed_twice()
    assert undecided(held, rows, tiles, tiles) == (0, 0.0)
    coded, places = held.coded(tiles)
    # what torch chose is the best there is
    codec, (codes, scales) = held.sides["k"].codec, coded["k"][2]
    facts = checks._Facts.of(codec.codec, codec.bits[2], 1, 64)
    latents, slack = (checks.by_rank(one, places) for one in checks._latents(codec.codec, rows["k"], 2))
    for tile, rank in ((0, 0), (0, 9), (1, 15)):
        given = latents[0, tile, 1, 48 + rank], slack[0, tile, 1, 48 + rank]
        assert facts.excess(*given, codes[0, tile, rank, 1], scales[0, tile, rank, 1]) <= 1.0
    # one level up or down of one channel: further from the latent than the nearest, however near that is not
    other = codes.clone()
    place = int(codec.bits[2, :64].argmax())
    other[0, 1, 5, 0, place] += 1 if int(other[0, 1, 5, 0, place]) == 0 else -1
    changed = held.packed({"k": [*coded["k"][:2], (other, scales)], "v": coded["v"]}, places)
    count, apart = undecided(held, rows, tiles, changed)
    assert count == 1
    assert apart > 10
    # a scale that is no candidate
    louder = scales.clone()
    louder[0, 0, 3, 1] *= 8
    changed = held.packed({"k": [*coded["k"][:2], (codes, louder)], "v": coded["v"]}, places)
    assert undecided(held, rows, tiles, changed) == (1, float("inf"))
    turned = places.clone()
    turned[0, 0, 0, [0, 40]] = turned[0, 0, 0, [40, 0]]
    assert undecided(held, rows, tiles, held.packed(coded, turned))[1] == float("inf")


def test_of_all_candidates_one_is_right() -> None:
    held, _, _ = packed_twice()
    codec = held.sides["k"].codec.codec
    facts = checks._Facts.of(codec, held.sides["k"].codec.bits[2], 0, 64)
    assert len(facts.coded) > 4
    unit = torch.randn(len(facts.coded), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    latents = torch.zeros(64, dtype=torch.float64)
    latents[facts.coded] = unit * facts.spread
    errors = {}
    for factor in checks.CANDIDATES:
        scale = float(checks.rounded_scale(unit.square().mean().sqrt() * factor, 8))
        index = facts.tables.nearest((latents / codec.variance[:64].sqrt().double() / scale)[None])[0]
        errors[facts.excess(latents, torch.zeros_like(latents), index.to(torch.int64), torch.tensor(scale))] = scale
    assert min(errors) <= 1.0
    assert sorted(errors)[1] > 1.0


@pytest.mark.usefixtures("machine")
def test_wrong_codes_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "packing_timings", lambda *_: ([], 7.0))
    with pytest.raises(AatcError, match="7 times"):
        measure_geometry(PROFILE, 2.0, [(320, 1)], 1, CUDA, Form(tiles=True, prompts=True))


@pytest.mark.usefixtures("machine")
def test_ragged_sequences_are_timed_beside_float16_of_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}

    class Bench:
        @classmethod
        def of(cls, geometry: Any, window: Any, bits: Any, theta: Any, lengths: list[int], device: Any) -> Bench:
            given["lengths"] = lengths
            return cls()

        def measure(self, repeats: int) -> tuple[Timing, float]:
            return Timing("fused-tiles", [2.0], 500), 0.002

    def attended(cache: ragged.RaggedCache, wrong: float = 0.0) -> Any:
        def attend() -> torch.Tensor:
            out = torch.empty_like(cache.query)
            for row, count in enumerate(cache.lengths):
                one, other = (side[row, :count].transpose(0, 1) for side in (cache.keys, cache.values))
                query = cache.query[row].view(2, 2, 64)
                out[row] = F.scaled_dot_product_attention(query, one, other).view(4, 64) + wrong
            return out

        return attend

    monkeypatch.setattr(ragged, "TileBench", Bench)
    monkeypatch.setattr(ragged, "graph_seconds", lambda call, repeats: [4.0 * call()])
    monkeypatch.setattr(ragged, "each_by_itself", attended)
    monkeypatch.setattr(ragged, "by_library", lambda path, cache: attended(cache, 1.0))
    form = Form(tiles=True, ragged=True, library="some.so")  # type: ignore[arg-type]
    result = measure_geometry(PROFILE, 2.0, [(256, 4)], 1, CUDA, form)
    assert given["lengths"] == [4, 88, 172, 256]
    assert [(row.part, row.backend, row.ratio) for row in result.rows] == [
        ("ragged", "sdpa-flash-each", 1.0),
        ("ragged", "fused-tiles", 0.5),
    ]
    assert result.rows[0].bytes_moved == (4 + 88 + 172 + 256) * 2 * 128 * 2
    assert list(result.left_out) == ["flashattention-3 at 4 x 256"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ragged": True}, "--ragged is of fused tiles"),
        ({"prompts": True}, "--prompts is of fused tiles"),
        ({"tiles": True, "ragged": True, "prompts": True}, "--ragged and --prompts are timed one at a time"),
        ({"tiles": True, "prompts": True, "whole_model": True}, "--prompts and --whole-model are timed"),
        ({"tiles": True, "prompts": True, "flash_attention": "x.so"}, "beside a prompt"),
    ],
)
def test_what_is_timed_instead_is_asked_for_alone(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _check_alone(Settings.model_validate(given, strict=False))
