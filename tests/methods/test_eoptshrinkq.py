"""eOptShrinkQ: shrinkage against the closed form of white noise and a written-out version, codes and bytes by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.eoptshrink import ShrunkResidual, coded_factors, fitted_levels, shrinkage, shrunk_factors
from aatc_cli.core.plain import NormedLloyd
from aatc_cli.methods.quantizers.shrunk import room
from aatc_cli.profiles import load_recipe


def spiked(strengths: tuple[float, ...], rows: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A low rank and the same with white noise of variance 1 / rows on top."""
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(rows, len(strengths))))[0]
    right = np.linalg.qr(rng.normal(size=(size, len(strengths))))[0]
    low = left * np.array(strengths) @ right.T
    return low, low + rng.normal(size=(rows, size)) / math.sqrt(rows)


def written_out(x: np.ndarray, rank: int) -> np.ndarray:
    """phi of the leading singular values, by sums over eigenvalues and differences for derivatives."""
    n, p = x.shape
    lam = np.linalg.svd(x, compute_uv=False) ** 2 / n
    k = int(p ** min(1 / 2.01, 1 / math.log(math.log(p))))
    reach = 1 / (2 ** (2 / 3) - 1)
    edge = lam[k] + reach * (lam[k] - lam[2 * k])
    r = min(sum(value / edge - 1 > p ** (-1 / 3) for value in lam), k, rank)
    noise = [lam[r + k] + reach * (1 - (j / k) ** (2 / 3)) * (lam[r + k] - lam[r + 2 * k]) for j in range(k)]
    noise += list(lam[r + k :])

    def transform(z: float) -> float:
        m1 = sum(1 / (value - z) for value in noise) / (p - r)
        m2 = p / n * m1 - (1 - p / n) / z
        return z * m1 * m2

    found = np.zeros(rank)
    for place in range(r):
        z, h = lam[place], lam[place] * 1e-5
        slope = (transform(z + h) - transform(z - h)) / (2 * h)
        found[place] = transform(z) / (math.sqrt(z) * abs(slope))
    return found * math.sqrt(n)


@pytest.mark.parametrize(("rows", "size"), [(128, 64), (256, 128), (128, 128)])
def test_shrinkage_as_written_out(rows: int, size: int) -> None:
    _, x = spiked((9.0, 5.0, 3.5), rows, size, seed=rows + size)
    _, values, _ = shrunk_factors(torch.from_numpy(x), 4)
    expected = written_out(x, 4)
    assert np.count_nonzero(expected) >= 2
    assert np.allclose(values[0].numpy(), expected, rtol=1e-4)


def test_shrinkage_tends_to_that_of_white_noise() -> None:
    """Gavish and Donoho: with noise of variance one, y of a direction becomes sqrt((y^2 - b - 1)^2 - 4 b) / y."""
    rows, size = 1024, 512
    low, x = spiked((6.0, 3.0), rows, size, seed=0)
    left, values, right = shrunk_factors(torch.from_numpy(x), 4)
    ratio = size / rows
    seen = np.linalg.svd(x, compute_uv=False)[:2]
    closed = np.sqrt((seen**2 - ratio - 1) ** 2 - 4 * ratio) / seen
    assert np.allclose(values[0, :2].numpy(), closed, rtol=0.02)
    assert values[0, 2:].tolist() == [0, 0]
    # nearer to what is under the noise than the plain truncation
    found = ((left * values) @ right.mT).numpy()
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    assert np.linalg.norm(found - low) < np.linalg.norm((u[:, :2] * s[:2]) @ vt[:2] - low)


def test_noise_has_no_direction_and_zero_stays_zero() -> None:
    _, x = spiked((), 128, 64, seed=4)
    assert shrunk_factors(torch.from_numpy(x), 4)[1].abs().max() == 0
    codec = ShrunkResidual(2, 128, 64, 4)
    assert torch.equal(codec.reconstruct(torch.zeros(1, 130, 128)), torch.zeros(1, 130, 128))
    assert shrinkage(torch.zeros(64, dtype=torch.float64), 128, 4).tolist() == [0] * 4


def test_a_block_is_factors_and_what_is_left() -> None:
    blocks = [spiked((12.0, 6.0), 128, 64, seed=seed)[1] for seed in (1, 2)]
    x = torch.from_numpy(np.concatenate(blocks, 1))[None]
    found = ShrunkResidual(2, 128, 64, 4).reconstruct(x)
    for head, block in enumerate(blocks):
        left, values, right = (part.numpy() for part in shrunk_factors(torch.from_numpy(block), 4))
        rest = block - left * values @ right.T
        levels = np.array([-1.5104, -0.4528, 0.4528, 1.5104])
        expected = coded_factors(*(torch.from_numpy(part) for part in (left, values, right))).numpy()
        for token in range(128):
            norm = float(np.float16(np.linalg.norm(rest[token])))
            codes = [int(np.abs(levels - u).argmin()) for u in rest[token] * 8 / norm]
            expected[token] += levels[codes] * norm / 8
        assert np.abs(found[0, :, 64 * head : 64 * head + 64].numpy() - expected).max() < 1e-3


def test_factors_take_16_levels_of_their_own() -> None:
    _, x = spiked((12.0, 6.0), 128, 64, seed=3)
    left, values, right = shrunk_factors(torch.from_numpy(x), 4)
    used = values[0] > 0
    entries = torch.cat((left[:, used], right[:, used])).flatten()
    points = fitted_levels(entries, torch.ones_like(entries))
    assert points.numel() == 16
    assert torch.equal(points, points.half().double())
    exact = (left * values) @ right.mT
    assert 0 < float((coded_factors(left, values, right) - exact).norm() / exact.norm()) < 0.15


def test_shared_context_is_worth_bits() -> None:
    """On a spiked block it is nearer than norm and levels alone, whichever side is the longer."""
    for rows, size in ((128, 64), (128, 256)):
        x = torch.from_numpy(spiked((14.0, 9.0), rows, size, seed=9)[1])[None]
        ours = (ShrunkResidual(2, rows, size, room(size)).reconstruct(x) - x).norm()
        assert float(ours) < 0.8 * float((NormedLloyd(2, size).reconstruct(x) - x).norm())


def test_bytes_by_hand() -> None:
    geometry = Geometry(layers=2, heads=4, kv_heads=2, head_dim=64, hidden_size=256)
    law = load_recipe("eoptshrinkq").choices.layout(
        geometry, HeadGroups.both(2), [[dict.fromkeys(("k", "v"), [2] * 128)] * 2]
    )
    found = law.breakdown(4 + 128 + 128)
    blocks = 2 * 2 * 2  # layers, sides, heads
    assert room(64) == 4
    assert found["norms"] == blocks * 128 * 2
    assert found["factors"] == blocks * 4 * (128 + 64) // 2
    assert found["singular_values"] == blocks * 4 * 2
    assert (found["levels"], found["ranks"]) == (blocks * 16 * 2, blocks)
