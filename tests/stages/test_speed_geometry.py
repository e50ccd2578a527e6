"""aatc eval speed of a geometry, with stand-ins for a GPU: what is written, refused, and counted as memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import read_measurement, write_evaluation
from aatc_cli.artifacts.run import Run
from aatc_cli.config import Geometry, Window
from aatc_cli.core.layout import fp16_bytes
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench import findings, ours
from aatc_cli.evals.bench import geometry as speed_geometry
from aatc_cli.evals.bench import steps as speed_steps
from aatc_cli.evals.bench import whole_model as speed_whole
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.geometry import Form, measure_geometry
from aatc_cli.evals.bench.model_steps import InPlaceState, full_state
from aatc_cli.evals.bench.packed import PackedBench
from aatc_cli.evals.bench.roofline import DeviceRates, TileWork
from aatc_cli.evals.bench.rows import speed_rows
from aatc_cli.evals.bench.synthetic import synthetic_tables
from aatc_cli.evals.bench.synthetic_spec import synthetic_spec
from aatc_cli.evals.bench.whole_model import fused_steps, memory_of, uncompressed_steps
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.speed.table import speed_memory_table, speed_table
from aatc_cli.evals.subjects import EvalOptions
from aatc_cli.profiles import Calibration, ModelProfile, TextMixture
from aatc_cli.stages.report import make_report

GEOMETRY = Geometry(layers=3, heads=8, kv_heads=4, head_dim=64, hidden_size=64)
WINDOW = Window(sinks=4, recent=128, flush=64)
CPU = torch.device("cpu")
RATES = DeviceRates(bytes=1e9, instructions=2e9, multiply_adds=4e9)
CUDA = EvalOptions(device="cuda")


def profile_of(geometry: Geometry) -> ModelProfile:
    """A profile of a model that is nowhere."""
    rates = TextMixture(sources=["builtin:python-docs"], samples=1, length=64)
    return ModelProfile(
        name="small",
        model="o/small",
        geometry=geometry,
        context=4096,
        head_groups=2,
        calibration=Calibration(rates=rates),
    )


PROFILE = profile_of(GEOMETRY)


class FakeBench:
    """A fused bench without kernels: tables and tiles are real, times are not."""

    error = 0.005

    def __init__(self, batch: int, context: int) -> None:
        self.tables = synthetic_tables(GEOMETRY, 2.0, 2, CPU)
        self.tiles = (context - 132) // 64

    @classmethod
    def of(cls, geometry: Geometry, window: Window, bits: float, theta: float, batch: int, context: int, device: Any):
        return cls(batch, context)

    def measure(self, repeats: int) -> tuple[Timing, float]:
        return Timing("fused", [3.0, 2.0, 4.0], 500), self.error


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    """A machine whose GPU is made of stand-ins."""
    for name, value in {
        "fused_available": lambda: True,
        "device_rates": lambda device: RATES,
        "device_name": lambda device: "a GPU",
    }.items():
        monkeypatch.setattr(speed_geometry, name, value)
    for name, value in {
        "peer_timings": lambda *_: ([Timing("flashinfer", [1.0, 1.5, 2.0], 1000)], {}),
        "sdpa_timings": lambda *_: [Timing("sdpa-flash-packed", [4.0, 4.0, 4.0], 1000)],
        "float8_timing": lambda *_: (Timing("float8-triton", [2.5, 2.5, 2.5], 510), 0.001, "float16 64"),
    }.items():
        monkeypatch.setattr(findings, name, value)
    monkeypatch.setattr(ours, "FusedBench", FakeBench)
    monkeypatch.setattr(FakeBench, "error", 0.005)
    return FakeBench


@pytest.mark.usefixtures("bench")
def test_every_backend_has_a_row_and_ours_has_roofs(tmp_path: Path) -> None:
    result = measure_geometry(PROFILE, 2.0, [(1412, 3)], 3, CUDA, Form())
    assert [row.backend for row in result.rows] == ["sdpa-flash-packed", "flashinfer", "float8-triton", "fused"]
    # the fastest on a bfloat16 cache is the reference, whoever it is of; the float8 cache is not one
    assert [row.ratio for row in result.rows] == pytest.approx([4 / 1.5, 1, 2.5 / 1.5, 3 / 1.5])
    ours = result.rows[-1]
    work = TileWork.of(synthetic_tables(GEOMETRY, 2.0, 2, CPU))
    assert ours.roof_bytes_milliseconds == pytest.approx(1e3 * 500 / 1e9)
    assert ours.roof_unpack_milliseconds == pytest.approx(1e3 * 3 * 20 * work.masks / 2e9)
    assert ours.roof_keys_milliseconds == pytest.approx(1e3 * 3 * 20 * work.multiply_adds / 4e9)
    assert ours.bound_milliseconds == pytest.approx(1e3 * 0.5 * 1.5)
    assert all(row.roof_bytes_milliseconds is None for row in result.rows[:-1])
    assert [(check.backend, check.error) for check in result.checks] == [("fused", 0.005), ("float8-triton", 0.001)]
    assert result.configurations == {"float8-triton at 3 x 1412": "float16 64"}
    assert (result.left_out, result.memory, result.groups) == ({}, [], None)
    assert read_measurement(write_evaluation(tmp_path / "evals", result), SpeedResult) == result
    table = speed_table([result])
    assert table.columns[-3:] == ["roof: bytes, ms", "unpacking, ms", "keys, ms"]
    assert [row[-1] == "" for row in table.rows] == [True, True, True, False]


def test_what_has_no_row_says_why(bench: type[FakeBench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "float8_timing", lambda *_: "Triton is not installed")
    monkeypatch.setattr(findings, "peer_timings", lambda *_: ([], {"flashinfer": "no whole pages"}))
    result = measure_geometry(PROFILE, 2.0, [(1412, 1)], 3, CUDA, Form())
    assert result.left_out == {
        "float8-triton at 1 x 1412": "Triton is not installed",
        "flashinfer at 1 x 1412": "no whole pages",
    }
    assert [row.backend for row in result.rows] == ["sdpa-flash-packed", "fused"]


@pytest.mark.usefixtures("bench")
def test_tiles_with_classes_are_timed_in_place_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeTiles:
        error = 0.002

        @classmethod
        def of(cls, geometry: Geometry, window: Window, bits: float, theta: float, lengths: list[int], device: Any):
            assert lengths == [1412] * 3
            return cls()

        def measure(self, repeats: int) -> tuple[Timing, float]:
            return Timing("fused-tiles", [3.0, 2.0, 4.0], 500), self.error

    monkeypatch.setattr(ours, "TileBench", FakeTiles)
    monkeypatch.setattr(speed_geometry, "on_hopper", lambda device: True)
    result = measure_geometry(PROFILE, 2.0, [(1412, 3)], 3, CUDA, Form(tiles=True))
    assert (result.recipe, result.rows[-1].backend) == ("synthetic-tiles", "fused-tiles")
    assert result.rows[-1].ratio == pytest.approx(3 / 1.5)
    assert read_measurement(write_evaluation(tmp_path / "evals", result), SpeedResult) == result
    monkeypatch.setattr(FakeTiles, "error", 0.2)
    with pytest.raises(AatcError, match="no time is reported"):
        measure_geometry(PROFILE, 2.0, [(1412, 3)], 3, CUDA, Form(tiles=True))
    monkeypatch.setattr(speed_geometry, "on_hopper", lambda device: False)
    with pytest.raises(AatcError, match=r"compute capability 9\.0"):
        measure_geometry(PROFILE, 2.0, [(1412, 3)], 3, CUDA, Form(tiles=True))


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_wrong_numbers_have_no_speed(bench: type[FakeBench], tmp_path: Path, monkeypatch: Any, error: float) -> None:
    monkeypatch.setattr(bench, "error", error)
    with pytest.raises(AatcError, match="no time is reported"):
        measure_geometry(PROFILE, 2.0, [(1412, 1)], 3, CUDA, Form())
    assert not (tmp_path / "evals").exists()


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize("groups", [1, 2])
def test_head_groups_of_several_heads_run_on_the_packed_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    original = PackedBench.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(PackedBench, "of", lambda *shape: original(PackedBench, *shape[:-1], CPU))
    result = measure_geometry(PROFILE, 2.0, [(700, 2)], 2, CUDA, Form(groups=groups))
    assert [row.backend for row in result.rows][-1] == "packed"
    assert (result.groups, result.method, result.rates) == (groups, f"synthetic-groups-{groups}-2", None)
    assert result.checks[0].backend == "packed"
    assert result.checks[0].error <= result.checks[0].bound
    assert result.rows[-1].roof_bytes_milliseconds is None


def test_a_roof_is_of_the_last_row_alone_and_ratios_without_references_are_to_it() -> None:
    rows = speed_rows("decode", (64, 1), [], [Timing("fused", [2.0, 1.0, 4.0], 10)])
    assert [(row.ratio, row.ratio_low, row.ratio_high) for row in rows] == [(1, 0.5, 2)]
    assert rows[0].gigabytes_per_second is None


@pytest.fixture(scope="module")
def spec() -> Any:
    return synthetic_spec(GEOMETRY, WINDOW, 2.0, 1e4, CPU, torch.bfloat16)


@pytest.mark.parametrize("tokens", [132, 133, 900])
def test_the_byte_law_is_what_a_state_holds(spec: Any, tokens: int) -> None:
    state = full_state(spec, 3, tokens, 0)
    # a state has room for a tile from the start
    spare = 3 * GEOMETRY.layers * spec.form.layers[0].tables.tile_bytes if tokens == 132 else 0
    assert spec.layout.bytes(tokens, 3) + spare == state.bytes_live()


def test_memory_is_told_apart(spec: Any) -> None:
    """Static tables and buffers tensor by tensor: nothing is counted twice, nothing left out."""
    state = full_state(spec, 2, 900, 64)
    live, static, buffers = memory_of(state)
    assert live == state.bytes_live()
    held: list[torch.Tensor] = []
    for layer in spec.form.layers:
        for part in (*layer.tables.keys, *layer.tables.values, layer.tables, layer.tables.key, layer.encode):
            held += [value for value in vars(part).values() if isinstance(value, torch.Tensor)]
    assert len({id(tensor) for tensor in held}) < len(held)
    assert static == sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in held}.values())
    shared = state.groups[0].stores[0].shared
    angles = (shared.slot_angles, shared.tile_angles, *shared.token_angles, spec.form.frequencies)
    assert buffers == sum(angle.nbytes for angle in angles) + 3 * 2 * 4


def test_peak_is_held_against_weights_and_the_law(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = torch.nn.Linear(4, 5), []
    weights = (4 * 5 + 5) * 4

    def timing(model: Any, state: Any, batch: int, repeats: int) -> Timing:
        seen.append(state.columns)
        return Timing("x", [1.0] * repeats, 1)

    monkeypatch.setattr(speed_whole, "start_over", seen.append)
    monkeypatch.setattr(speed_whole, "decode_timing", timing)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10**9)
    _, ours = fused_steps(model, spec, GEOMETRY, 500, 2, 80)
    law = spec.layout.bytes(500 + 85, 2)
    assert (ours.weight_bytes, ours.law_bytes, ours.live_bytes, ours.peak_bytes) == (weights, law, law, 10**9)
    assert ours.ratio == pytest.approx(1e9 / (weights + law))
    timings, theirs = uncompressed_steps(model, GEOMETRY, 500, 2, 3, CPU)
    assert len(timings) == len(theirs) == 2
    assert theirs[0].law_bytes == theirs[0].live_bytes == fp16_bytes(GEOMETRY, 500, 2)
    assert (theirs[0].static_bytes, theirs[0].buffer_bytes) == (0, 0)
    assert seen == [CPU, 500, CPU, 499, 499]


def test_a_cache_that_does_not_fit_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no")

    monkeypatch.setattr(speed_whole, "start_over", lambda device: None)
    monkeypatch.setattr(InPlaceState, "__init__", full)
    assert uncompressed_steps(torch.nn.Linear(1, 1), GEOMETRY, 500, 2, 3, CPU) == ([], [])


def test_the_largest_uncompressed_batch_stands_in_for_one_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def theirs(model: Any, geometry: Any, context: int, batch: int, *_: Any) -> Any:
        asked.append((context, batch))
        return ([Timing("sdpa-flash", [batch / 100], 9)], []) if batch < 8 else ([], [])

    for name, value in {
        "random_llama": lambda *_: torch.nn.Linear(1, 1),
        "uncompressed_steps": theirs,
        "largest_batch": lambda *_: 7,
        "tile_spec": lambda *_: None,
        "tile_steps": lambda *_: (Timing("fused-tiles", [0.1], 5), None),
    }.items():
        monkeypatch.setattr(speed_steps, name, value)
    found = findings.Findings()
    speed_steps.compare_steps(found, PROFILE, 2.0, [(500, 96)], 3, "cuda", tiles=True)
    assert asked == [(500, 96), (500, 7)]
    assert [(row.batch, row.backend, row.ratio) for row in found.rows] == [(7, "sdpa-flash", 1), (96, "fused-tiles", 1)]


@pytest.mark.usefixtures("bench")
def test_whole_steps_are_beside_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    order: list[str] = []

    def memory(backend: str) -> Any:
        return speed_whole.SpeedMemory(
            context=500,
            batch=2,
            backend=backend,
            peak_bytes=30,
            weight_bytes=20,
            law_bytes=5,
            live_bytes=5,
            static_bytes=3,
            buffer_bytes=1,
            ratio=1.2,
        )

    def theirs(*_: Any) -> Any:
        order.append("uncompressed")
        return [Timing("sdpa-flash", [2.0], 9)], [memory("sdpa-flash")]

    def ours(*_: Any) -> Any:
        order.append("fused")
        return Timing("fused", [1.0], 5), memory("fused")

    def spec_of(*_: Any) -> Any:
        order.append("tables")
        return spec

    for name, value in {
        "random_llama": lambda *_: torch.nn.Linear(1, 1),
        "uncompressed_steps": theirs,
        "fused_steps": ours,
        "synthetic_spec": spec_of,
    }.items():
        monkeypatch.setattr(speed_steps, name, value)
    result = measure_geometry(PROFILE, 2.0, [(500, 2), (600, 2)], 3, CUDA, Form(whole=True))
    # tables of the fused cache are no part of what an uncompressed one takes
    assert order == ["uncompressed", "uncompressed", "tables", "fused", "fused"]
    decode = [row for row in result.rows if row.part == "decode"]
    assert [(row.context, row.backend, row.ratio) for row in decode] == [
        (500, "sdpa-flash", 1),
        (500, "fused", 0.5),
        (600, "sdpa-flash", 1),
        (600, "fused", 0.5),
    ]
    assert [row.backend for row in result.memory] == ["sdpa-flash", "fused"] * 2
    table = speed_memory_table([result])
    assert table.rows[1] == ["synthetic-2", "500", "2", "fused", *["0.0"] * 6, "1.2"]


@pytest.mark.usefixtures("bench")
def test_the_report_has_times_bounds_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    result = measure_geometry(PROFILE, 2.0, [(1412, 3)], 3, CUDA, Form())
    row = speed_whole.SpeedMemory(
        context=500,
        batch=2,
        backend="fused",
        peak_bytes=30_000_000,
        weight_bytes=20,
        law_bytes=5,
        live_bytes=5,
        static_bytes=3,
        buffer_bytes=1,
        ratio=1.25,
    )
    write_evaluation(run.evals, result)
    other = result.model_copy(update={"device": "another GPU", "budget": "3", "memory": [row]})
    write_evaluation(run.evals, other)
    files = make_report(run)
    section = files.markdown.read_text("utf-8").partition("## Speed")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    ours = [line for line in lines if line[4:5] == ["fused"]]
    work = TileWork.of(synthetic_tables(GEOMETRY, 2.0, 2, CPU))
    bounds = ["0.0005", f"{1e3 * 60 * work.masks / 2e9:.4g}", f"{1e3 * 60 * work.multiply_adds / 4e9:.4g}"]
    for line, name in zip(ours[:2], ("synthetic-2", "synthetic-3"), strict=True):
        assert line[0] == name
        assert line[-3:] == bounds
    assert ["synthetic-3", "500", "2", "fused", "30.0", *["0.0"] * 5, "1.25"] in lines
    assert "Speed of small on another GPU" in section
    assert section.count("Speed of small on") == 2
    told = json.loads(files.json.read_text("utf-8"))["speed"]
    assert told == [one.model_dump(mode="json") for one in (result, other)]
    older = result.model_copy(update={"versions": {**result.versions, "torch": "1.0"}, "budget": "4"})
    write_evaluation(run.evals, older)
    apart = make_report(run).markdown.read_text("utf-8").partition("## Speed")[2].partition("\n## ")[0]
    assert apart.count("Speed of small on") == 3, "times of another torch stand in a table of their own"


PROFILED = ("eval", "speed", "--profile", "llama-3.1-8b-instruct", "--budget", 2)


def test_what_a_profile_cannot_be_timed_with_is_refused(refuses: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("AATC_MODEL", raising=False)
    command = (*PROFILED, "--run", tmp_path)
    refuses(*command, says=("timed on a CUDA device",), folder=tmp_path)
    refuses(*command, "--groups", "all", says=("timed on a CUDA device",), folder=tmp_path)
    for wrong in ("3", "0", "-1", "some"):
        refuses(*command, "--groups", wrong, says=(f"8 kv heads do not make {wrong}",), folder=tmp_path, code=2)
    refuses(*command, "--groups", "2", "--whole-model", says=("timed with the fused cache",), folder=tmp_path, code=2)
    refuses(*command, "--groups", "2", "--tiles", says=("a head group for every head",), folder=tmp_path, code=2)
