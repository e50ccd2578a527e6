"""whiten on a device, and layers begun before their turn: the same Transform wherever and however it is computed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.artifact import Artifact, open_artifact
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.transform import WhitenSettings
from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core import SIDES
from aatc_cli.core.stats import LayerStats
from aatc_cli.stages import whitening as module
from aatc_cli.stages.ahead import ahead
from aatc_cli.stages.whiten import whiten
from aatc_cli.stages.whitening import whiten_layer

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
HEADS, DIM = 4, 16
GEOMETRY = Geometry(layers=1, heads=8, kv_heads=HEADS, head_dim=DIM, hidden_size=64)


def some_stats(seed: int, tokens: int = 900) -> LayerStats:
    """A layer with correlated rows and gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    root = normal(HEADS, DIM, DIM)
    stats = LayerStats.empty(GEOMETRY, 400, root @ root.mT)
    channels = GEOMETRY.channels
    k, v, g = (normal(tokens, channels) @ normal(channels, channels) + normal(channels) for _ in range(3))
    stats.update(normal(tokens, 8, DIM), k, v, torch.arange(400))
    for side, gradients in (("k", g), ("v", g.flip(1))):
        stats.add_gradients(side, gradients)
    stats.readers = 700
    return stats


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [(kind, groups) for kind in ("whiten", "metric", "metric-centred", "pca", "identity") for groups in (1, 2, HEADS)]
    + [("hadamard", HEADS), ("query", HEADS)],
)
def test_a_layer_is_what_numpy_makes_of_each_group(kind: Any, groups: int, device: str) -> None:
    """Variances, weights and scales from dense matrices of the whole site; the matrices by what they are for."""
    basis, rates = some_stats(1), some_stats(2)
    settings = WhitenSettings(transform=kind, head_groups=HeadGroups.both(groups), shrinkage=0.2)
    found = whiten_layer(basis, rates, settings, torch.device(device))
    for side in SIDES:
        codec, weight, loss_weight = found.sites[side]
        for part in (codec.encode, codec.decode, codec.scale, codec.variance, weight, loss_weight):
            assert (part.device.type, part.dtype) == ("cpu", torch.float64)
        encode, decode = (torch.block_diag(*matrices).numpy() for matrices in (codec.encode, codec.decode))
        np.testing.assert_allclose(encode @ decode, np.eye(GEOMETRY.channels), atol=1e-9)
        moments, metrics = {}, {}
        for name, stats in (("basis", basis), ("rates", rates)):
            outer, total, fisher = (getattr(stats, f"{side}_{part}").numpy() for part in ("outer", "sum", "fisher"))
            mean = total / 900 if kind in ("pca", "metric-centred") else np.zeros_like(total)
            moments[name] = outer / 900 - np.outer(mean, mean)
            metrics[name] = (0.8 * fisher + 0.2 * np.diag(fisher.diagonal())) / 700
        np.testing.assert_allclose(codec.variance, np.diag(encode.T @ moments["rates"] @ encode), rtol=1e-9)
        np.testing.assert_allclose(loss_weight, np.diag(decode @ metrics["rates"] @ decode.T), rtol=1e-9)
        form = torch.block_diag(*(rates.q_outer / 900 if side == "k" else rates.o_gram)).numpy()
        np.testing.assert_allclose(weight, np.diag(decode @ form @ decode.T), rtol=1e-9)
        rows = (rates.k_rows if side == "k" else rates.v_rows).numpy().astype(float)
        if kind == "metric-centred":
            rows -= getattr(rates, f"{side}_sum").numpy() / 900
            np.testing.assert_allclose(found.tables[f"{side}.mean"], getattr(rates, f"{side}_sum").numpy() / 900)
        np.testing.assert_allclose(codec.scale, np.percentile(np.abs(rows @ encode), 99, axis=0), rtol=1e-9)
        blocks = np.kron(np.eye(groups), np.ones((GEOMETRY.channels // groups,) * 2)).astype(bool)
        if kind in ("whiten", "metric", "metric-centred", "pca"):
            seen = encode.T @ moments["basis"] @ encode
            assert np.abs((seen - np.diag(seen.diagonal()))[blocks]).max() < 1e-9 * seen.max()
        if kind.startswith("metric"):
            price = decode @ metrics["basis"] @ decode.T
            assert np.abs((price - np.eye(len(price)))[blocks]).max() < 1e-2  # but for damping


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["whiten", "metric"])
def test_a_gpu_gives_what_the_cpu_does(kind: Any, groups: int) -> None:
    """Signs, order and all: eigenvectors agree up to rounding over the gaps of their eigenvalues."""
    stats = some_stats(3)
    settings = WhitenSettings(transform=kind, head_groups=HeadGroups.both(groups))
    here, there = (whiten_layer(stats, stats, settings, torch.device(place)) for place in ("cpu", "cuda"))
    for side in SIDES:
        for one, other in zip(here.sites[side][1:], there.sites[side][1:], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-8, atol=0)
        for name in ("encode", "decode", "scale", "variance"):
            one, other = (getattr(found.sites[side][0], name) for found in (here, there))
            torch.testing.assert_close(other, one, rtol=0, atol=1e-8 * float(one.abs().max()))


def made(folder: Path, base: Path, **options: Any) -> Artifact:
    run = Run(folder)
    whiten(run, transform_stats=base / "stats", rate_stats=base / "stats", **options)
    return open_artifact(run.transform("whiten"), "transform")


def test_layers_begun_ahead_are_the_same(base_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(tmp_path / "one", base_run)
    threads: set[int] = set()
    genuine = module.whiten_layer

    def spy(*arguments: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return genuine(*arguments, **options)

    monkeypatch.setattr(module, "workers_of", lambda device: 3)
    monkeypatch.setattr(module, "whiten_layer", spy)
    other = made(tmp_path / "other", base_run)
    assert threading.get_ident() not in threads
    assert one.manifest.digest == other.manifest.digest
    assert one.manifest.provenance["device"] == "cpu"
    assert "device" not in one.manifest.settings


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_order_and_bound_of_work_ahead(workers: int) -> None:
    begun: list[int] = []

    def work(index: int) -> int:
        begun.append(index)
        return index * index

    taken = []
    for value in ahead(work, 12, workers):
        assert len(begun) <= len(taken) + workers
        taken.append(value)
    assert taken == [index * index for index in range(12)]
    assert sorted(begun) == list(range(12))


@pytest.mark.parametrize("workers", [1, 3])
def test_errors_of_work_ahead_are_raised_in_its_turn(workers: int) -> None:
    def work(index: int) -> int:
        if index == 2:
            raise ValueError("two")
        return index

    taken: list[int] = []
    with pytest.raises(ValueError, match="two"):
        taken.extend(ahead(work, 9, workers))
    assert taken == [0, 1]


@pytest.mark.parametrize(("device", "says"), [("foo", "'foo'"), ("meta", "'meta'"), ("cuda:99", "device cuda:99")])
def test_a_device_that_is_not_there(refuses: Any, run_folder: Path, device: str, says: str) -> None:
    refuses("whiten", "--run", run_folder, "--device", device, "--force", says=(says,), folder=run_folder)
