"""Restored levels: what they are read as, and what their curve says, against a normal sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.curves import DISTORTION, DISTORTION_UNIFORM, restored, restoring_gain
from aatc_cli.core.lloyd import Tables
from aatc_cli.errors import AatcError


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("uniform", "table"), [(False, DISTORTION), (True, DISTORTION_UNIFORM)])
@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_the_curve_is_what_a_sample_loses(bits: int, uniform: bool, table: tuple[float, ...], share: float) -> None:
    """x comes back as c x and noise: the noise counts once, the square of what is missing of x twice."""
    x = normal(400_000, 1, seed=bits)
    tables = Tables.of(torch.tensor([bits]), x, uniform, share)
    back = tables.values(tables.nearest(x))
    kept = float((back * x).mean() / x.square().mean())
    noise = float((back - kept * x).square().mean())
    assert 2 * (1 - kept) ** 2 + noise == pytest.approx(restored(table, share)[bits], rel=0.02)


def test_without_bits_everything_is_missing() -> None:
    assert restored(DISTORTION, 0.5)[0] == 2.0


@pytest.mark.parametrize("table", [DISTORTION, DISTORTION_UNIFORM])
def test_the_curve_is_convex_and_falls(table: tuple[float, ...]) -> None:
    gains = -np.diff(restored(table, 0.5))
    assert (gains > 0).all()
    assert (np.diff(gains) < 0).all()


@pytest.mark.parametrize("quantizer", ["lloyd", "uniform"])
def test_codes_are_those_of_the_plain_levels(quantizer: str) -> None:
    """Only reading differs: every level times a number that its width decides."""
    eye, ones = torch.eye(12, dtype=torch.float64)[None], torch.ones(12, dtype=torch.float64)
    bits = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 0])
    plain = TransformCodec(eye, eye, ones, bits, ones, quantizer)
    moved = replace(plain, restored=0.5)
    x = normal(50, 12, seed=3)
    for one, other in zip(plain.quantize(x), moved.quantize(x), strict=True):
        assert torch.equal(one, other)
    table = DISTORTION if quantizer == "lloyd" else DISTORTION_UNIFORM
    gain = torch.tensor([restoring_gain(table[width], 0.5) for width in bits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(moved.reconstruct(x), plain.reconstruct(x) * gain, rtol=1e-12, atol=1e-15)
    with pytest.raises(AatcError, match="another unit"):
        moved.units()
