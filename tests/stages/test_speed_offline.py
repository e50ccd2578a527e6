"""aatc eval offline-speed on a geometry small enough for a CPU: what is timed, written, left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.evaluation import read_measurement
from aatc_cli.artifacts.run import Run
from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals import find_task
from aatc_cli.evals.call import Call
from aatc_cli.evals.offline_speed.settings import Settings
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.subjects import EvalOptions
from aatc_cli.profiles import Calibration, ModelProfile, TextMixture
from aatc_cli.studies import offline_model
from aatc_cli.studies.offline_model import OfflineBench
from aatc_cli.studies.offline_speed import offline_speed
from aatc_cli.studies.offline_times import measure_offline

GEOMETRY = Geometry(layers=3, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
PROFILE = ModelProfile(
    name="small",
    model="o/small",
    geometry=GEOMETRY,
    context=512,
    head_groups=1,
    calibration=Calibration(rates=TextMixture(sources=["builtin:python-docs"], samples=1, length=64)),
)
CPU = torch.device("cpu")


@pytest.fixture
def bench() -> OfflineBench:
    return OfflineBench.of(PROFILE, CPU, torch.float32)


def test_every_part_is_timed_and_written(tmp_path: Path, capsys: Any) -> None:
    asked = Settings(context=(144, 160), batch=(1, 2), repeats=2)
    [result] = offline_speed(find_task("offline-speed"), Call(Run(tmp_path), EvalOptions(), profile=PROFILE), asked)
    assert read_measurement(tmp_path / "evals" / result.file_name, SpeedResult) == result
    assert result.file_name.startswith("speed.offline-stages.")
    assert (result.synthetic, result.absolute, result.left_out) == (True, False, {})
    assert [(row.part, row.context, row.batch, row.backend) for row in result.rows] == [
        *(
            ("collect", *size, name)
            for size in ((144, 1), (144, 2), (160, 1), (160, 2))
            for name in ("uncompressed", "statistics", "gradients")
        ),
        # rows of two windows of 140 tokens each
        ("whiten", 280, 3, "whiten, command"),
        ("whiten", 280, 3, "metric, command"),
        ("whiten", 280, 2, "whiten, cpu"),
        ("whiten", 280, 2, "metric, cpu"),
    ]
    assert all(0 < row.milliseconds_low <= row.milliseconds <= row.milliseconds_high for row in result.rows)
    assert [row.ratio for row in result.rows if row.backend == "uncompressed"] == [1.0] * 4
    told = capsys.readouterr().err
    assert told.index("statistics at 144 x 1") < told.index("gradients at 160 x 2") < told.index("metric of 2 layers")


def test_the_passes_are_those_of_collect(bench: OfflineBench) -> None:
    """Sums of all windows, with gradients and what tokens received, none of them of nothing."""
    windows = bench.windows((144, 2))
    job = bench.job(windows)
    bench.statistics(windows, 2, job)
    bench.gradients(windows, 2, job)
    for stats in job.layers:
        assert stats.count == windows.shape[0] * 140
        assert stats.filled == stats.k_rows.shape[0] == stats.count
        for name, tensor in stats.tensors().items():
            assert torch.isfinite(tensor).all(), name
            assert float(tensor.abs().max()) > 0, name
    assert bench.forward(windows, 2) > 0


def test_windows_are_enough_to_whiten(bench: OfflineBench) -> None:
    wide = OfflineBench(GEOMETRY.model_copy(update={"kv_heads": 128, "heads": 128}), bench.model, CPU)
    assert bench.windows((144, 3)).shape == (6, 144)
    assert wide.geometry.channels == 1024
    assert wide.windows((144, 3)).shape == (9, 144)  # 1024 channels over 140 tokens of a window are 8 windows


def test_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    genuine = offline_model.run_gradients

    def scarce(job: Any, model: Any, windows: Any, start: int, options: Any, *rest: Any) -> None:
        if options.batch > 1:
            raise AatcError("the gradients of 2 windows do not fit", "lower --fisher-batch")
        genuine(job, model, windows, start, options, *rest)

    monkeypatch.setattr(offline_model, "run_gradients", scarce)
    result = measure_offline(PROFILE, [(144, 2), (144, 1)], 1, EvalOptions())
    assert result.left_out == {"gradients 144 x 2": "the gradients of 2 windows do not fit"}
    assert [row.batch for row in result.rows if row.backend == "gradients"] == [1]


def test_the_command(aatc: Any, refuses: Any, tmp_path: Path) -> None:
    profile = tmp_path / "small.toml"
    lines = [f"{name} = {getattr(GEOMETRY, name)}" for name in ("layers", "heads", "kv_heads", "head_dim")]
    text = ['name = "small"', 'model = "o/small"', "context = 512", "head_groups = 1", "[geometry]", *lines]
    text += ["hidden_size = 32", "[calibration.rates]", 'sources = ["builtin:python-docs"]', "samples = 1"]
    profile.write_text("\n".join([*text, "length = 64"]), encoding="utf-8")
    command = ("eval", "offline-speed", "--profile", profile, "--run", tmp_path / "run")
    outcome = aatc(*command, "--context", 144, "--batch", 1, "--repeats", 1, "--json")
    assert outcome.code == 0, outcome.err
    [result] = json.loads(outcome.out)
    assert {row["part"] for row in result["rows"]} == {"collect", "whiten"}
    refuses(*command, "--context", 133, says=("133 tokens", "132"), folder=tmp_path, code=2)
    refuses(*command, "--device", "cuda:99", says=("device cuda:99",), folder=tmp_path)
