"""Codecs of published methods against small implementations of their definitions, element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.hadamard import hadamard, random_signs
from aatc_cli.core.linear import LinearCodec, truncated
from aatc_cli.core.plain import Float8Codec, NormedLloyd
from aatc_cli.errors import AatcError


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * (1 + 5 * torch.rand(shape[-1], generator=generator)) + 0.7


def min_max(values: list[float], bits: int, clip: float = 1.0) -> list[float]:
    """The definition for one group, in numpy scalars."""
    low, high = min(values), max(values)
    middle, half = (low + high) / 2, (high - low) / 2 * clip
    base, scale = float(np.float16(middle - half)), float(np.float16(2 * half / (2**bits - 1)))
    if scale == 0:
        return [base] * len(values)
    codes = [min(max(round((value - base) / scale), 0), 2**bits - 1) for value in values]
    return [base + scale * code for code in codes]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_keys_per_channel_over_groups_of_tokens(bits):
    x = data(2, 70, 6, seed=bits)
    found = GroupedMinMax(torch.full((6,), bits), 32, "channel").reconstruct(x)
    for b in range(2):
        for c in range(6):
            for start in (0, 32):
                want = min_max(x[b, start : start + 32, c].double().tolist(), bits)
                assert found[b, start : start + 32, c].tolist() == pytest.approx(want, abs=1e-5)
    assert torch.equal(found[:, 64:], x[:, 64:])


@pytest.mark.parametrize(("bits", "clip"), [(1, 1.0), (2, 0.96), (3, 1.0), (4, 0.9)])
def test_values_per_token_over_groups_of_channels(bits, clip):
    x = data(2, 5, 12, seed=bits)
    found = GroupedMinMax(torch.full((12,), bits), 4, clip=clip).reconstruct(x)
    for b, t, start in np.ndindex(2, 5, 3):
        span = slice(4 * start, 4 * start + 4)
        want = min_max(x[b, t, span].double().tolist(), bits, clip)
        assert found[b, t, span].tolist() == pytest.approx(want, abs=1e-5)


def test_groups_have_widths_of_their_own_and_nothing_is_divided_by_zero():
    x = data(3, 8)
    x[1, :4] = 2.5
    x[2] = 0
    found = GroupedMinMax(torch.tensor([2] * 4 + [0] * 4), 4).reconstruct(x)
    assert found[0, :4].tolist() == pytest.approx(min_max(x[0, :4].double().tolist(), 2), abs=1e-6)
    assert found[1, :4].tolist() == [2.5] * 4
    assert not found[:, 4:].any()
    assert torch.isfinite(found).all()
    huge = GroupedMinMax(torch.full((4,), 4), 4).reconstruct(torch.tensor([[-1e6, 0.0, 1.0, 1e6]]))
    assert torch.isfinite(huge).all()


def test_groups_of_tokens_do_not_see_one_another():
    x = data(1, 64, 3)
    codec = GroupedMinMax(torch.full((3,), 2), 32, "channel")
    other = x.clone()
    other[:, 32:] *= 9
    assert torch.equal(codec.reconstruct(x)[:, :32], codec.reconstruct(other)[:, :32])
    assert torch.equal(codec.reconstruct(x)[:, 32:], codec.reconstruct(x[:, 32:]))


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 44, 60, 64, 76, 80, 96, 104, 128, 160, 192, 224, 352, 416])
def test_hadamard_matrices_are_orthogonal_and_even(order):
    matrix = hadamard(order)
    assert torch.allclose(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, order**-0.5))


@pytest.mark.parametrize("order", [3, 6, 10, 30])
def test_hadamard_orders_that_cannot_be(order):
    with pytest.raises(AatcError, match=f"order {order}"):
        hadamard(order)


def test_signs_are_a_function_of_the_size():
    assert set(random_signs(64).tolist()) == {-1.0, 1.0}
    assert torch.equal(random_signs(64), random_signs(64))
    assert not torch.equal(random_signs(64), random_signs(64, seed=1))


# the quantizer of Lloyd and Max for a unit normal as tabulated by Max (1960)
MAX_1960 = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_norm_and_levels(bits):
    x = data(4, 32)
    found = NormedLloyd(bits, 16).reconstruct(x)
    positive = MAX_1960[bits]
    points = [-value for value in reversed(positive)] + positive
    for t, g in np.ndindex(4, 2):
        row = x[t, 16 * g : 16 * g + 16].double().tolist()
        norm = float(np.float16(math.sqrt(sum(value * value for value in row))))
        want = [min(points, key=lambda p, v=v: abs(v * 4 / norm - p)) * norm / 4 for v in row]
        assert found[t, 16 * g : 16 * g + 16].tolist() == pytest.approx(want, rel=1e-3)
    assert not NormedLloyd(bits, 16).reconstruct(torch.zeros(2, 16)).any()


def test_eight_bit_floats_are_the_nearest_of_all():
    grid = [0.0]
    for exponent in range(16):
        for mantissa in range(8):
            if (exponent, mantissa) != (15, 7):
                grid.append((mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    grid = sorted({*grid, *(-value for value in grid)})
    x = torch.cat((data(200, 3).flatten(), torch.tensor([1e-4, 447.0, 449.0, 1e9, -1e9])))
    found = Float8Codec().reconstruct(x)
    for value, got in zip(x.double().tolist(), found.tolist(), strict=True):
        assert got in grid
        assert abs(got - value) == min(abs(point - value) for point in grid)


def test_low_rank_map_around_a_codec():
    generator = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(2, 12, 12, generator=generator, dtype=torch.float64))[0]
    x = torch.randn(5, 24, generator=generator, dtype=torch.float64)
    mean = torch.randn(24, generator=generator, dtype=torch.float64)

    class Exact:
        def reconstruct(self, h):
            return h

    first, second = truncated(basis, basis.mT, 4, rotate=True)
    assert first.shape == (2, 12, 4)
    found = LinearCodec(first, second, Exact(), mean).reconstruct(x)
    for g in range(2):
        span = slice(12 * g, 12 * g + 12)
        projector = sum(torch.outer(basis[g][:, i], basis[g][:, i]) for i in range(4))
        want = (x[:, span] - mean[span]) @ projector + mean[span]
        assert torch.allclose(found[:, span], want, atol=1e-12)
    assert torch.allclose(truncated(basis, basis.mT, 4)[0], basis[:, :, :4])
    coded = LinearCodec(first, second, GroupedMinMax(torch.full((8,), 4), 4)).reconstruct(x)
    for t, g in np.ndindex(5, 2):
        latent = x[t, 12 * g : 12 * g + 12] @ basis[g][:, :4] @ hadamard(4)
        want = torch.tensor(min_max(latent.tolist(), 4), dtype=torch.float64) @ hadamard(4).T @ basis[g][:, :4].T
        assert torch.allclose(coded[t, 12 * g : 12 * g + 12], want, atol=1e-9)
