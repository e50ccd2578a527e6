"""Collecting with two processes: the sums of one process up to their order, the very same rows, one artifact."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from aatc_cli.errors import AatcError
from aatc_cli.stages.collecting import processes as module
from aatc_cli.stages.collecting.processes import Processes, joined

# 97 rows are shared unevenly; 4096 are more than there are tokens, so that every row is kept
ROWS = [97, pytest.param(4096, marks=pytest.mark.slow)]


@pytest.mark.parametrize("rows", ROWS)
def test_two_processes_collect_what_one_does(
    aatc: Any, torchrun: Any, same_stats: Any, tiny_llama: Path, corpus: Path, tmp_path: Path, rows: int
) -> None:
    arguments = ["--model", str(tiny_llama), "--text", str(corpus), "--samples", "7", "--length", "160"]
    arguments += ["--rows", str(rows), "--fisher", "3", "--dtype", "float32"]
    assert aatc("collect", *arguments, "--run", tmp_path / "1").code == 0
    done = torchrun(arguments, tmp_path / "2", 2)
    assert done.returncode == 0, done.stderr
    # one process is heard
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.count("collect gradients: ") == 1
    assert same_stats(tmp_path / "1", tmp_path / "2").manifest.provenance["processes"] == 2


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_refused(
    torchrun: Any, tiny_llama: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.artifacts.stats import CollectSettings
    from aatc_cli.models.loading import find_model
    from aatc_cli.profiles import TextMixture
    from aatc_cli.stages import collect as stage

    settings = CollectSettings(samples=4, length=64)
    mixture = TextMixture(sources=[str(corpus)], samples=4, length=64)

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    run = Run(tmp_path / "run")
    monkeypatch.setattr(stage, "replace_directory", stop)
    with pytest.raises(KeyboardInterrupt):
        stage.collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, stage.CollectOptions())
    arguments = ["--model", str(tiny_llama), "--text", str(corpus), "--samples", "4", "--length", "64"]
    refused = torchrun(arguments, run.root, 2)
    assert refused.returncode != 0
    assert "is the checkpoint of one process" in refused.stderr
    forced = torchrun([*arguments, "--force"], run.root, 2)
    assert forced.returncode == 0, forced.stderr
    again = torchrun(arguments, run.root, 2)
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


def test_a_process_whose_companions_do_not_come_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"} | place).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "PATIENCE", timedelta(seconds=1))
    with pytest.raises(AatcError, match="process 0 of 2 waited for the others for 0:00:01"), joined("cpu"):
        pytest.fail("it went on alone")
