"""Ranks, widths per head and blocks of one precision against brute force and hand arithmetic."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch

from aatc_cli.core.block_codec import BlockCodec, block_errors
from aatc_cli.core.grouped import head_errors
from aatc_cli.core.head_rates import WIDEST, fitted_curves
from aatc_cli.core.precision_blocks import SIZES, WIDTHS, Block, block_widths, blocks_of, choose_blocks
from aatc_cli.core.ranks import proportional_ranks, rounded_rank
from aatc_cli.errors import AatcError


def test_ranks_follow_importance_and_caps():
    assert proportional_ranks(np.array([1.0, 3.0]), 100, 80) == [20, 60]
    # the second would get 120 of 100: what it cannot take goes to the others in proportion
    assert proportional_ranks(np.array([1.0, 6.0, 1.0]), 100, 160) == [30, 100, 30]
    assert proportional_ranks(np.array([1.0, 1.0, 1.0]), 10, 20) == [7, 7, 6]
    assert proportional_ranks(np.array([1.0, 5.0]), 10, 99) == [10, 10]
    assert proportional_ranks(np.zeros(2), 10, 8) == [4, 4]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        importance = rng.random(7) ** 4
        ranks = proportional_ranks(importance, 64, 300)
        assert sum(ranks) == 300
        assert max(ranks) <= 64
        below = [(value, rank) for value, rank in zip(importance, ranks, strict=True) if rank < 64]
        assert all(a[1] <= b[1] for a, b in product(below, below) if a[0] < b[0])


def test_ranks_in_whole_multiples():
    assert [rounded_rank(rank, 1, 192, 32) for rank in (134, 143, 144, 3, 192)] == [128, 128, 160, 32, 192]
    assert rounded_rank(300, 2, 512, 32) == 160


def test_errors_per_head_are_those_of_the_quantizer():
    torch.manual_seed(0)
    rows = torch.randn(300, 32) * torch.cat((torch.ones(16), torch.full((16,), 3.0)))
    errors = head_errors(rows, 2, WIDEST)
    assert errors.shape == (2, WIDEST + 1)
    assert errors[:, 0].tolist() == pytest.approx(
        [float(rows[:, :16].square().mean()), float(rows[:, 16:].square().mean())]
    )
    row, total = rows.double().numpy(), 0.0
    for r in range(300):
        part = row[r, 16:]
        low, scale = np.float16(part.min()), np.float16((part.max() - part.min()) / 7)
        total += float(((low + scale * np.clip(np.round((part - low) / scale), 0, 7) - part) ** 2).mean())
    assert float(errors[1, 3]) == pytest.approx(total / 300, rel=1e-3)


def test_fitted_curves():
    widths = np.arange(WIDEST + 1)
    exact = np.stack([5.0 * 3.7**-widths, 0.2 * 5.1**-widths, np.zeros(WIDEST + 1)])
    assert fitted_curves(exact, 1) == pytest.approx(exact)
    exact[:, 1] *= 3
    assert fitted_curves(exact, 2)[:, 2:] == pytest.approx(exact[:, 2:])
    rng = np.random.default_rng(0)
    noisy = 2.0 * 4.0**-widths * np.exp(rng.normal(size=WIDEST + 1) / 5)
    slope, level = np.polyfit(widths[1:], np.log2(noisy[1:]), 1)
    assert fitted_curves(noisy[None], 1)[0] == pytest.approx(2.0 ** (level + slope * widths))


def test_codes_of_a_block():
    h = torch.tensor([[1.0, -2.0, 0.3, 0.0, 1.99]])
    found = BlockCodec((Block(0, 3, 2), Block(3, 1, 1))).reconstruct(h)
    # scale 2, step 1: 1 -> [1, 2) -> 1.5, -2 -> -1.5, 0.3 -> 0.5; the second block is all zero; the last is dropped
    assert found.tolist() == [[1.5, -1.5, 0.5, 0.0, 0.0]]


def all_programmes(errors, energy, budget):
    """Least error of every sequence of blocks whose precision never rises."""
    count = errors.shape[0]

    def best(start, widest, left):
        found = float(energy[16 * start :].sum())
        for place, size in enumerate(SIZES):
            for index in range(widest, len(WIDTHS)):
                cost = size * WIDTHS[index] + 16
                if start + size // 16 <= count and cost <= left:
                    rest = best(start + size // 16, index, left - cost)
                    found = min(found, errors[start, place, index] + rest)
        return found

    return best(0, 0, budget)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    energy = np.sort(rng.exponential(size=96))[::-1] ** 2
    rows = torch.from_numpy(rng.normal(size=(40, 96)) * np.sqrt(energy))
    errors = block_errors(rows).numpy()
    for budget in (48, 150, 330, 600):
        blocks = choose_blocks(errors, energy, budget)
        assert sum(block.size * block.bits + 16 for block in blocks) <= budget
        assert all(a.bits >= b.bits and a.start + a.size == b.start for a, b in pairwise(blocks))
        end = blocks[-1].start + blocks[-1].size if blocks else 0
        found = float(energy[end:].sum()) + sum(
            errors[b.start // 16, SIZES.index(b.size), WIDTHS.index(b.bits)] for b in blocks
        )
        assert found == pytest.approx(all_programmes(errors, energy, budget))


def test_block_errors_are_what_the_codec_leaves():
    torch.manual_seed(0)
    rows = torch.randn(30, 80, dtype=torch.float64)
    errors = block_errors(rows)
    for start, size, bits in ((0, 16, 8), (32, 16, 2), (16, 64, 1)):
        left = BlockCodec((Block(start, size, bits),)).reconstruct(rows)[:, start : start + size]
        want = (left - rows[:, start : start + size]).square().sum(1).mean()
        assert float(errors[start // 16, SIZES.index(size), WIDTHS.index(bits)]) == pytest.approx(float(want))
    assert torch.isinf(errors[2, SIZES.index(64)]).all()


def test_blocks_survive_being_written_down():
    blocks = (Block(0, 16, 8), Block(16, 64, 4), Block(80, 64, 4), Block(144, 16, 1))
    widths, starts = block_widths(blocks, 192)
    assert sum(widths) == 16 * 8 + 128 * 4 + 16
    assert blocks_of(widths, starts) == blocks
    assert blocks_of([0] * 32, [0] * 32) == ()


def test_a_budget_below_one_block_is_refused():
    with pytest.raises(AatcError, match="do not pay for one block"):
        choose_blocks(np.zeros((6, 4, 4)), np.ones(96), 20)
