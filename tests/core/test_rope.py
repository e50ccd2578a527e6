"""Rotary embedding against transformers' own, complex multiplication, and the property it exists for."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from aatc_cli.core.rope import apply_rope, rotate_half, unapply_rope

DIM = 16


def tables(positions: torch.Tensor, rotary: int = DIM, base: float = 10_000.0):
    """cos and sin [B, T, rotary] of positions [B, T], every angle twice."""
    frequencies = base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = positions[..., None].to(torch.float64) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_same_as_transformers():
    x, q = keys(2, 3, 7, DIM), keys(2, 6, 7, DIM, seed=1)
    cos, sin = tables(torch.tensor([[0, 1, 2, 3, 4, 5, 6], [9, 11, 13, 500, 501, 8000, 8191]]))
    expected_q, expected_k = apply_rotary_pos_emb(q, x, cos, sin)
    assert torch.equal(apply_rope(x, cos, sin), expected_k)
    assert torch.equal(apply_rope(q, cos, sin), expected_q)
    as32 = apply_rope(x.float(), cos.float(), sin.float())
    assert as32.dtype == torch.float32
    torch.testing.assert_close(as32.double(), expected_k, rtol=0, atol=1e-5)


def test_pairs_turn_like_complex_numbers():
    x, positions = keys(1, 2, 5, DIM), torch.tensor([[0, 1, 10, 100, 1000]])
    turned = apply_rope(x, *tables(positions))
    pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
    angles = positions[0, :, None].double() * 10_000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    expected = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(turned[..., : DIM // 2], expected.real, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(turned[..., DIM // 2 :], expected.imag, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(turned[:, :, 1:], x[:, :, 1:], atol=0.1)


def test_rotate_half_by_hand():
    assert rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]


@pytest.mark.parametrize("rotary", [4, 8, DIM])
def test_unapply_inverts(rotary):
    x = keys(2, 3, 9, DIM)
    cos, sin = tables(torch.arange(9).repeat(2, 1) * 37, rotary)
    turned = apply_rope(x, cos, sin)
    assert (turned - x).abs().max() > 0.5
    torch.testing.assert_close(unapply_rope(turned, cos, sin), x, rtol=0, atol=1e-14)
    torch.testing.assert_close(apply_rope(unapply_rope(x, cos, sin), cos, sin), x, rtol=0, atol=1e-14)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


def test_partial_rotary_leaves_the_rest_untouched():
    x = keys(1, 2, 6, DIM)
    cos, sin = tables(torch.arange(6)[None] + 3, rotary=4)
    turned = apply_rope(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], apply_rope(x[..., :4], cos, sin))
    assert (turned[..., :4] - x[..., :4]).abs().max() > 0.5


@pytest.mark.parametrize("shift", [1, 50, 4000])
def test_scores_depend_on_the_distance_only(shift):
    q, k = keys(1, 1, 1, DIM), keys(1, 1, 1, DIM, seed=1)

    def score(i: int, j: int) -> float:
        turned = [apply_rope(x, *tables(torch.tensor([[p]]))) for x, p in ((q, i), (k, j))]
        return float((turned[0] * turned[1]).sum())

    assert score(30 + shift, 7 + shift) == pytest.approx(score(30, 7), abs=1e-10)
    assert abs(score(30 + shift, 7) - score(30, 7)) > 1e-3
