"""Collecting with two processes: the sums of one process up to their order, the very same rows, one artifact."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aatc_cli.artifact import open_artifact
from aatc_cli.stages.processes import Processes, joined

# 97 rows are shared unevenly; 4096 are more than there are tokens, so that every row is kept
ROWS = [97, pytest.param(4096, marks=pytest.mark.slow)]


def collect(arguments: list[str], run: Path, processes: int) -> subprocess.CompletedProcess[str]:
    # torchrun takes --run for an abbreviation of one of its own options, so the run is named by the environment
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "AATC_RUN": str(run)}
    command = [sys.executable, *launch, "-m", "aatc_cli", "collect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.mark.parametrize("rows", ROWS)
def test_two_processes_collect_what_one_does(aatc, tiny_llama: Path, corpus: Path, tmp_path: Path, rows: int) -> None:
    arguments = ["--model", str(tiny_llama), "--text", str(corpus), "--samples", "7", "--length", "160"]
    arguments += ["--rows", str(rows), "--fisher", "3", "--dtype", "float32"]
    assert aatc("collect", *arguments, "--run", tmp_path / "1").code == 0
    done = collect(arguments, tmp_path / "2", 2)
    assert done.returncode == 0, done.stderr
    # one process is heard
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.count("collect gradients: ") == 1
    alone, both = (open_artifact(tmp_path / str(n) / "stats", "stats") for n in (1, 2))
    assert both.manifest.provenance["processes"] == 2
    assert both.manifest.results == alone.manifest.results
    assert both.manifest.settings == alone.manifest.settings
    assert both.manifest.tensors.keys() == alone.manifest.tensors.keys()
    for name in alone.manifest.tensors:
        expected, got = alone.tensor(name), both.tensor(name)
        if name.endswith(("_rows", "o_gram")):
            assert torch.equal(got, expected), name
        else:
            assert (got - expected).abs().max() <= 1e-12 * expected.abs().max(), name
            assert expected.abs().max() > 0


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_refused(
    tiny_llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import TextMixture
    from aatc_cli.stages import collect as stage
    from aatc_cli.stages.collect_job import CollectSettings
    from aatc_cli.stages.files import Run

    settings = CollectSettings(samples=4, length=64)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=64)

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    run = Run(tmp_path / "run")
    monkeypatch.setattr(stage, "replace_directory", stop)
    with pytest.raises(KeyboardInterrupt):
        stage.collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, stage.CollectOptions())
    arguments = ["--model", str(tiny_llama), "--text", str(corpus), "--samples", "4", "--length", "64"]
    refused = collect(arguments, run.root, 2)
    assert refused.returncode != 0
    assert "is the checkpoint of one process" in refused.stderr
    forced = collect([*arguments, "--force"], run.root, 2)
    assert forced.returncode == 0, forced.stderr
    again = collect(arguments, run.root, 2)
    assert again.returncode == 0, again.stderr
    assert "inputs unchanged, nothing to do" in again.stderr
    assert len(again.stdout.splitlines()) == 1


@pytest.mark.parametrize(("windows", "count"), [(7, 2), (3, 4), (256, 8), (5, 5)])
def test_shares_cover_all_windows_once(windows: int, count: int) -> None:
    shares = [Processes(rank, count).share(windows) for rank in range(count)]
    assert [w for start, stop in shares for w in range(start, stop)] == list(range(windows))
    sizes = [stop - start for start, stop in shares]
    assert max(sizes) - min(sizes) <= 1


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined("cpu") as processes:
        assert (processes.rank, processes.count, processes.first) == (0, 1, True)
        assert processes.device("cuda") == "cuda"
        assert processes.agree(True) is True
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert Processes(3, 4).device("cuda") == "cuda:3"
    assert Processes(3, 4).device("cpu") == "cpu"
