"""collect --also: Stats of fewer windows kept on the way are those of collecting these windows alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.console import Ticker
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.models.loading import find_model
from aatc_cli.profiles import TextMixture
from aatc_cli.stages.collect import CollectOptions, collect

SAMPLES, LENGTH = 5, 160


@pytest.fixture(scope="module")
def run_collect(tiny_llama: Path, corpus: Path) -> Callable[..., Stats]:
    """Collect into a run: gradients of four of five windows."""

    def run_(root: Path, name: str = "stats", first: int | None = None, **how: Any) -> Stats:
        settings = CollectSettings(samples=SAMPLES, length=LENGTH, rows=40, fisher=4, first=first)
        mixture = TextMixture(sources=[str(corpus)], samples=SAMPLES, length=LENGTH)
        collect(Run(root), name, find_model(str(tiny_llama)), mixture, settings, CollectOptions(**how))
        return Stats.open(Run(root).stats(name))

    return run_


@pytest.fixture(scope="module")
def kept(run_collect: Callable[..., Stats], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("also")
    run_collect(root, also=(2, 3))
    return root


def same(a: Path, b: Path) -> bool:
    left, right = (dict(open_artifact(path, "stats").tensors()) for path in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_they_are_those_of_the_first_windows(kept: Path, tmp_path: Path, run_collect: Callable[..., Stats]) -> None:
    whole = run_collect(tmp_path, "whole")
    assert same(kept / "stats", whole.path)
    assert Stats.open(kept / "stats").manifest.digest == whole.manifest.digest
    for first in (2, 3):
        alone, found = run_collect(tmp_path, f"alone-{first}", first), Stats.open(kept / f"stats-{first}")
        assert (found.windows, found.fisher_windows) == (first, first)
        assert same(found.path, alone.path)
        assert found.manifest.digest == alone.manifest.digest
    # a sum over two windows and one over three differ by the third
    assert run_collect(tmp_path, "beyond", 4).fisher_windows == 4


@pytest.mark.parametrize("after", [1, 3, 6, 8])
def test_an_interrupted_one_keeps_them_all_the_same(
    kept: Path, tmp_path: Path, run_collect: Callable[..., Stats], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Stopped in forward passes and in gradients, before and behind what is kept."""

    class Killed(BaseException):
        pass

    genuine, steps = Ticker.advance, []

    def advance(self: Ticker, count: int = 1, text: str | None = None) -> None:
        genuine(self, count, text)
        steps.append(count)
        if len(steps) > after:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Ticker, "advance", advance)
        with pytest.raises(Killed):
            run_collect(tmp_path, also=(2, 3), checkpoint_seconds=0.0)
    run_collect(tmp_path, also=(2, 3))
    assert all(same(kept / name, tmp_path / name) for name in ("stats", "stats-2", "stats-3"))


def test_what_cannot_be_kept_is_refused(
    kept: Path, tmp_path: Path, run_collect: Callable[..., Stats], capsys: pytest.CaptureFixture[str]
) -> None:
    run_collect(kept, also=(2,))
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(AatcError, match="stats is there and stats-4 is not"):
        run_collect(kept, also=(4,))
    with pytest.raises(UsageError, match="Stats of 5 windows are not kept on the way of 5"):
        run_collect(tmp_path, also=(5,))
    with pytest.raises(UsageError, match="--first 6 asks for more windows than the 5"):
        run_collect(tmp_path, first=6)
