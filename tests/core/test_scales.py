"""Token scales in one byte: the grid by its definition, the nearest of all codes, and the quantizers on the grid."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.core import lloyd, quantizer
from aatc_cli.core.scales import pack_scales, rounded_scale, scale_grid, unpack_scales

CPU = torch.device("cpu")


def test_the_grid():
    grid = scale_grid(CPU)
    assert grid.dtype == torch.float16
    assert grid.tolist() == [0.0, *(float(np.float16(2 ** ((c - 128) / 16))) for c in range(1, 256))]
    assert grid[128] == 1.0
    assert torch.equal(pack_scales(grid), torch.arange(256, dtype=torch.uint8))
    assert torch.equal(unpack_scales(torch.arange(256, dtype=torch.uint8)), grid)


def test_the_grid_of_four_bits():
    """Two and a half codes to an octave, from a tenth to five."""
    grid = scale_grid(CPU, 4)
    assert grid.tolist() == [0.0, *(float(np.float16(2 ** ((c - 9) / 2.5))) for c in range(1, 16))]
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(pack_scales(grid, 4), codes)
    assert torch.equal(unpack_scales(codes, 4), grid)
    assert rounded_scale(torch.tensor([0.0, 1e-6, 1.0, 1e6]), 4).tolist() == [0.0, *grid[[1, 9, 15]].tolist()]


def test_the_nearest_code_in_ratio():
    alpha = torch.exp2(12 * torch.randn(4000, generator=torch.Generator().manual_seed(0))).to(torch.float16)
    alpha = torch.cat((alpha, torch.tensor([0.0, 6e-8, 65504.0], dtype=torch.float16)))
    codes = pack_scales(alpha)
    logs = np.log2(scale_grid(CPU)[1:].double().numpy())
    for value, code in zip(alpha.tolist(), codes.tolist(), strict=True):
        if value == 0:
            assert code == 0
            continue
        distances = np.abs(logs - np.log2(value))
        assert distances[code - 1] <= distances.min() + 1e-3
        if 2**-7.9 < value < 2**7.9:
            assert abs(np.log2(float(unpack_scales(torch.tensor([code]))[0]) / value)) < 1 / 32 + 1e-3


def test_sixteen_bits_are_float16_that_saturates():
    values = torch.tensor([0.0, 1e-9, 0.1, 3.3, 1e9])
    assert rounded_scale(values, 16).tolist() == [0.0, 0.0, *values[2:4].half().tolist(), 65504.0]
    assert rounded_scale(values, 8).tolist() == [
        0.0,
        0.0,
        *unpack_scales(pack_scales(values[2:4])).tolist(),
        float(np.float16(2 ** (127 / 16))),
    ]


@pytest.mark.parametrize("kind", ["uniform-token-max", "lloyd"])
def test_quantizers_choose_scales_of_the_grid(kind):
    """Codes belong to the scale that is stored, and cost a few per cent more error than those of a float16 scale."""
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(500, 64, generator=generator, dtype=torch.float64)
    h = h * torch.exp2(torch.randn(500, 1, generator=generator, dtype=torch.float64))
    ones, bits = torch.ones(64, dtype=torch.float64), torch.full((64,), 3)
    errors = {}
    for scale_bits in (8, 16):
        if kind == "lloyd":
            tables = lloyd.Tables.of(bits, ones)
            codes, alpha = lloyd.quantize(h, ones, tables, ones, 2, scale_bits)
            back = lloyd.dequantize(codes, alpha, ones, tables)
        else:
            alpha = quantizer.token_scale(h, ones, bits, 2, scale_bits)
            back = quantizer.dequantize(quantizer.quantize(h, alpha, ones, bits), alpha, ones, bits)
        assert alpha.dtype == torch.float16
        assert alpha.shape == (500, 2)
        errors[scale_bits] = float((h - back).square().sum() / h.square().sum())
        on_grid = torch.isin(alpha, scale_grid(CPU))
        assert on_grid.all() == (scale_bits == 8)
    assert 0.97 < errors[8] / errors[16] < 1.06
