"""Several GPUs of one host: windows shared over processes that NCCL connects, and one model spread by accelerate.

`pytest -m gpu -k nccl` runs these where two CUDA devices are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.evals import opened
from aatc_cli.evals.reading import read_evaluations
from aatc_cli.stages import collect as collect_stage

DEVICES = torch.cuda.device_count()
# gradients flow back through sums that a GPU takes in no fixed order, in the model's float32
GRADIENTS = 1e-5

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices, torch sees {DEVICES}")]


@pytest.fixture
def arguments(tiny_llama: Path, corpus: Path) -> list[str]:
    """Of collect: an odd number of windows and of rows, so that the shares differ."""
    size = ["--samples", "7", "--length", "160", "--rows", "97", "--fisher", "3", "--dtype", "float32"]
    return ["--model", str(tiny_llama), "--text", str(corpus), *size]


def test_two_gpus_collect_what_one_does(
    aatc: Any, torchrun: Any, same_stats: Any, arguments: list[str], tmp_path: Path
) -> None:
    alone = aatc("collect", *arguments, "--device", "cuda", "--run", tmp_path / "1")
    assert alone.code == 0, alone.err
    done = torchrun([*arguments, "--device", "cuda"], tmp_path / "2", 2, 240)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.count("collect gradients: ") == 1
    both = same_stats(tmp_path / "1", tmp_path / "2", gradients=GRADIENTS)
    assert both.manifest.provenance["processes"] == 2
    assert both.manifest.provenance["device"].startswith("cuda")


def test_a_process_without_a_gpu_ends_all_of_them(torchrun: Any, arguments: list[str], tmp_path: Path) -> None:
    done = torchrun([*arguments, "--device", "cuda"], tmp_path / "run", DEVICES + 1, 240)
    assert done.returncode != 0
    assert f"process {DEVICES} has no GPU of its own: {DEVICES} are seen" in done.stderr
    assert not (tmp_path / "run" / "stats").exists()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The devices of every model that the stages load from now on."""
    seen: list[set[str]] = []
    for stage in (collect_stage, opened):

        def recorded(*args: Any, load: Any = stage.load_model, **keywords: Any) -> Any:
            model = load(*args, **keywords)
            seen.append({str(parameter.device) for parameter in model.parameters()})
            return model

        monkeypatch.setattr(stage, "load_model", recorded)
    return seen


def test_nccl_is_not_needed_for_a_model_spread_over_the_gpus(
    aatc: Any, same_stats: Any, new_model: Any, corpus: Path, tmp_path: Path, places: list[set[str]]
) -> None:
    """Statistics, KL and NLL of 8 layers, so many that each of the devices gets some, are those on one device."""
    model = new_model(tmp_path / "model", num_hidden_layers=8)
    size = ("--samples", 5, "--length", 160, "--rows", 97, "--fisher", 3, "--batch", 2)
    one, auto = tmp_path / "one", tmp_path / "auto"

    def run(command: str, place: Path, *options: object) -> None:
        outcome = aatc(command, "--run", place, *options)
        assert outcome.code == 0, outcome.err

    placed = {one: ("--device", "cuda"), auto: ("--device-map", "auto")}
    given = ("--model", model, "--text", corpus, "--dtype", "float32")
    for place, where in placed.items():
        run("collect", place, *given, *where, *size)
    both = same_stats(one, auto, tolerance=1e-6, gradients=GRADIENTS)
    assert both.manifest.provenance["device_map"] == "auto"
    run("whiten", one)
    run("allocate", one, "--budget", 3)
    found = []
    for place, where in placed.items():
        # one and the same plan, whatever the last digits of the sums
        plan = ("--plan", one / "plans" / "paper-3")
        run("eval", place, *given, *where, *plan, "--length", 256, "--first", 160, "--limit", 1)
        found += read_evaluations(place / "evals")
    assert [len(devices) for devices in places] == [1, min(DEVICES, 8)] * 2, places
    plain, spread = found
    assert plain.kl_mean is not None
    assert plain.kl_mean > 1e-4
    assert spread.kl_mean == pytest.approx(plain.kl_mean, rel=1e-4)
    assert spread.nll == pytest.approx(plain.nll, rel=1e-5)
