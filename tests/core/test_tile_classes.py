"""Ranks in a tile, quotas, bytes and widths of tiles: by counting, by brute force and against the exact sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.lloyd import DISTORTION
from aatc_cli.core.received import received_by_head, received_far, received_near
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.tile_allocate import allocate_planes, spent_bits
from aatc_cli.core.tile_bytes import TileBytes, packed_bits, planes_of
from aatc_cli.core.tile_classes import rows_of, tile_ranks
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_options import Units
from aatc_cli.core.tile_rule import TileRule, check_quotas, tile_lags
from aatc_cli.core.tile_sizes import RANKS, TILE
from aatc_cli.core.tile_tags import pack_classes, unpack_classes
from aatc_cli.errors import AatcError

CURVE = np.array(DISTORTION[:9])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_classes_are_quotas_of_sorted_tokens():
    rule, received = TileRule((32, 16, 16)), normal(2, 3, 128).abs()
    classes = rule.classes_of(received, 0, 0)
    for b, h, tile in itertools.product(range(2), range(3), range(2)):
        span = slice(64 * tile, 64 * tile + 64)
        falling = sorted(range(64), key=lambda i: received[b, h, span][i])
        wanted = {i: 0 if rank < 32 else 1 if rank < 48 else 2 for rank, i in enumerate(falling)}
        assert classes[b, h, span].tolist() == [wanted[i] for i in range(64)]


def test_ties_go_by_place():
    assert tile_ranks(torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == [2, 0, 3, 1]


def test_lags_are_what_every_token_of_a_tile_meets():
    """Of a window of 128 tokens the last token of a tile has met 64 queries when the tile leaves."""
    assert tile_lags(128) == (32, 64)
    assert TileRule((8, 8)).lags(32) == (8, 16)


def test_shares_of_ranks():
    shares = torch.from_numpy(TileRule((32, 16, 16)).rank_shares())
    assert shares.tolist() == [[0.5, 0.5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert RANKS == 4


@pytest.mark.parametrize("quotas", [(64,), (48, 16), (32, 16, 16), (16, 16, 16, 16)])
def test_classes_survive_packing(quotas):
    rule = TileRule(quotas)
    classes = rule.classes_of(normal(3, 2, 64), 0, 0)
    data = pack_classes(classes, rule.classes)
    assert data.shape == (3, 2, {1: 0, 2: 8, 3: 16, 4: 16}[rule.classes])
    if rule.classes > 1:
        assert torch.equal(unpack_classes(data, rule.classes), classes)
    rows = rows_of(classes)
    assert torch.equal(classes.gather(-1, rows), rule.class_of_rank().expand_as(classes))
    for tile in rows.flatten(0, 1).tolist():
        assert sorted(tile) == list(range(64))
        at = 0
        for quota in quotas:
            assert tile[at : at + quota] == sorted(tile[at : at + quota])
            at += quota


def test_quotas_that_cannot_be():
    assert check_quotas((32, 16, 16), 16, 64) is None
    assert "multiples of 16" in check_quotas((40, 24), 16, 64)
    assert "multiples" in check_quotas((), 16, 64)
    assert "sum to 64" in check_quotas((32, 16), 16, 64)


@pytest.mark.parametrize("length", [1, 40, 150])
def test_received_by_head_is_that_of_full_weights(length):
    query, keys = normal(2, 6, length, 8, seed=1), normal(2, 2, length, 8, seed=2)
    scores = (query @ keys.repeat_interleave(3, 1).mT * 0.7).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
    )
    weights = scores.softmax(-1)
    got = received_by_head(query, keys, 0.7, (4, 8))
    for b, h, i in itertools.product(range(2), range(2), range(length)):
        wanted = sum(
            float(weights[b, j, t, i]) ** 2 for t in range(i + 4, min(i + 9, length)) for j in range(3 * h, 3 * h + 3)
        )
        assert got[b, h, i] == pytest.approx(wanted, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("length", [1, 63, 64, 200])
@pytest.mark.parametrize("lags", [(4, 8), (32, 64), (64, 200)])
@pytest.mark.parametrize("way", [received_near, received_far])
def test_known_sums_give_the_same_by_near_keys_alone(length, lags, way):
    query, keys = normal(2, 6, length, 8, seed=1), normal(2, 2, length, 8, seed=2)
    scores = (query @ keys.repeat_interleave(3, 1).mT * 0.7).masked_fill(
        torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
    )
    expected = received_by_head(query, keys, 0.7, lags)
    assert way(query, keys, scores.logsumexp(-1), 0.7, lags) == pytest.approx(expected, rel=1e-12, abs=1e-15)


GEOMETRY = Geometry(layers=1, heads=4, kv_heads=2, head_dim=8, hidden_size=32)


def ranked_stats(length: int, window: Window) -> tuple[LayerStats, torch.Tensor, torch.Tensor]:
    stats = LayerStats.empty(GEOMETRY, 4, torch.zeros(2, 8, 8))
    received, gradients = normal(3, 2, length, seed=5).abs(), normal(3, length, 16, seed=6)
    stats.add_ranked("v", received, gradients, window)
    return stats, received, gradients


def test_gradients_are_added_by_rank():
    """Against sums over single tokens; the last tile lacks queries that watch it, and does not count."""
    window = Window(sinks=3, recent=96, flush=16)
    stats, received, gradients = ranked_stats(3 + 2 * TILE + 32 + TILE - 1, window)
    wanted = torch.zeros(2, RANKS, 2, 8, 8, dtype=torch.float64)
    for b, tile, h in itertools.product(range(3), range(2), range(2)):
        span = slice(3 + TILE * tile, 3 + TILE * tile + TILE)
        for order, scores in enumerate((received[b, :, span].sum(0), received[b, h, span])):
            for rank, i in enumerate(sorted(range(TILE), key=lambda i: scores[i])):
                g = gradients[b, span][i, 8 * h : 8 * h + 8]
                wanted[order, rank * RANKS // TILE, h] += torch.outer(g, g)
    torch.testing.assert_close(stats.v_ranks.double(), wanted, rtol=1e-5, atol=1e-4)
    assert not stats.k_ranks.any()
    assert "v_ranks" in stats.tensors()
    assert "k_ranks" not in stats.tensors()


def test_costs_of_ranks_are_relative():
    window = Window(sinks=3, recent=96, flush=16)
    stats, _, _ = ranked_stats(3 + 2 * TILE + 32, window)
    decode = normal(2, 8, 8, seed=8)
    costs = stats.rank_costs("v", decode, 0.0)
    assert costs.shape == (2, RANKS, 16)
    torch.testing.assert_close(costs.mean(1), torch.ones(2, 16, dtype=torch.float64))
    row = decode[1, 3]
    by_rank = torch.stack([row @ group[1].double() @ row for group in stats.v_ranks[1]])
    torch.testing.assert_close(costs[1, :, 11], by_rank / by_rank.mean())
    # nothing collected: every rank costs the same
    assert (stats.rank_costs("k", decode, 0.1) == 1).all()


def test_too_short_for_a_tile():
    stats, _, _ = ranked_stats(60, Window())
    assert not stats.v_ranks.any()


def test_bytes_of_a_tile_by_counting():
    """Digits of every channel written down one by one, in planes of sixteen."""
    random, rule = np.random.default_rng(0), TileRule((32, 16, 16))
    widths = {side: random.integers(0, 9, (3, 2, 40)) for side in SIDES}
    widths["k"][0, 1] = 0
    found = TileBytes.of(widths, rule, 2, 8)
    stored = scales = 0
    for side, (k, quota), group in itertools.product(SIDES, enumerate((32, 16, 16)), range(2)):
        twos = [2 for width in widths[side][k, group] for _ in range(width // 2)]
        ones = [1 for width in widths[side][k, group] if width % 2]
        planes = [digits[at : at + 16] for digits in (twos, ones) for at in range(0, len(digits), 16)]
        stored += sum(16 * plane[0] * quota // 8 for plane in planes)
        scales += quota if planes else 0
    assert found.codes_keys + found.codes_values + found.padding == stored
    assert found.codes_keys == sum(widths["k"][k].sum() * q for k, q in enumerate((32, 16, 16))) / 8
    assert found.token_scales == scales
    # two masks of 64 tokens for each kv head
    assert found.classes == 2 * 16
    assert TileBytes.of(widths, TileRule((32, 16, 16), "layer"), 2, 8).classes == 16
    assert found.total % 16 == 0
    assert packed_bits([found, found], 64, 80) == pytest.approx(found.total * 8 / 64 / 160)


def test_digits_fill_planes():
    twos, ones = planes_of(np.array([[5] * 8 + [2] * 8, [0] * 15 + [1]]))
    assert twos.tolist() == [2, 0]
    assert ones.tolist() == [1, 1]


def units_of(count: int, size: int, seed: int) -> Units:
    random = np.random.default_rng(seed)
    energy = 10.0 ** random.normal(-3, 1, (count, 1)) * np.exp(random.normal(0, 2.0, (count, size)))
    return Units(energy, random.choice([16, 32], count))


def best_in(energy: np.ndarray, bits: int) -> float:
    """Least error of any widths with at most ``bits`` bits, planes or not: a lower bound, greedy and exact."""
    gains = np.sort((energy[:, None] * (CURVE[:-1] - CURVE[1:])).ravel())[::-1]
    return float(energy.sum() - gains[:bits].sum())


def error_of(energy: np.ndarray, widths: np.ndarray) -> float:
    return float((energy * CURVE[widths]).sum())


@pytest.mark.parametrize("bits", [0.4, 1.0, 2.0, 3.5])
def test_planes_are_filled_and_paid(bits):
    pool = [units_of(16, 64, 0), units_of(6, 128, 1)]
    budget = int(bits * sum(int(units.tokens.sum()) * units.energy.shape[1] for units in pool))
    widths, level = allocate_planes(pool, budget, CURVE, 8)
    spent = spent_bits(pool, widths, 8)
    assert level > 0
    # what is left buys no plane of the smallest class
    assert budget - 16 * (16 + 8) < spent <= budget
    left = bound = 0.0
    for units, found in zip(pool, widths, strict=True):
        assert found.max() <= 8
        for energy, row in zip(units.energy, found, strict=True):
            twos, ones = planes_of(row)
            room = 16 * (2 * int(twos) + int(ones))
            assert room - int(row.sum()) < 16, "a plane with room that a channel could use"
            left, bound = left + error_of(energy, row), bound + best_in(energy, room)
    assert left < 1.15 * bound


def test_widths_of_a_small_unit_against_all():
    """One unit of few channels: no widths that fit into as many planes leave less."""
    random = np.random.default_rng(3)
    for budget_bits in (24, 40, 56):
        energy = np.exp(random.normal(0, 2, 4))
        pool = [Units(energy[None], np.array([16]))]
        [widths], _ = allocate_planes(pool, 16 * budget_bits, CURVE, 8)
        got = error_of(energy, widths[0])
        options = (
            np.array(option)
            for option in itertools.product(range(9), repeat=4)
            if spent_bits(pool, [np.array([option])], 8) <= 16 * budget_bits
        )
        assert got <= min(error_of(energy, option) for option in options) * (1 + 1e-12)


def test_values_follow_keys():
    """Values are coded only where the keys in their place are, and the budget is spent all the same."""
    keys, values = units_of(24, 48, 0), units_of(24, 48, 1)
    values = Units(values.energy, keys.tokens)
    budget = int(0.3 * int(keys.tokens.sum()) * 96)
    (free, wide), _ = allocate_planes([keys, values], budget, CURVE, 8)
    assert (~free.any(1) & wide.any(1)).any(), "nothing to follow"
    widths, _ = allocate_planes([keys, values], budget, CURVE, 8, follow=True)
    assert not (~widths[0].any(1) & widths[1].any(1)).any()
    assert budget - 32 * (32 + 8) < spent_bits([keys, values], widths, 8) <= budget


def test_a_budget_below_nothing():
    with pytest.raises(AatcError, match="bits are missing"):
        allocate_planes([units_of(2, 64, 0)], -5, CURVE, 8)


@pytest.mark.parametrize("quantizer", ["lloyd", "uniform", "uniform-token-max"])
def test_classes_side_by_side_are_those_alone(quantizer):
    random = np.random.default_rng(1)
    encode = normal(2, 8, 8, seed=1) + 3 * torch.eye(8)
    variance = torch.exp(normal(16, seed=2))
    codec = TransformCodec(
        encode, torch.linalg.inv(encode), variance.sqrt() * 3, variance.long(), variance, quantizer, variance, 8
    )
    bits = torch.from_numpy(random.integers(0, 5, (3, 16)))
    bits[0, 8:] = 0
    tiles, x = TileCodec(codec, bits, TileRule((32, 16, 16))), normal(2, 30, 16, seed=4)
    found = tiles.reconstruct(x)
    for k in range(3):
        assert torch.equal(found[k], codec.with_bits(bits[k]).reconstruct(x))
    assert tiles.coded().tolist() == [[True, False], [True, True], [True, True]]


def test_few_large_units_spend_what_they_may():
    """Heads of 256 whose energies fall at all speeds: a budget is not left over while a channel could be wider."""
    rng = np.random.default_rng(0)
    curve = np.array(DISTORTION[:9])
    # of forty draws those that a search by levels alone leaves most of, up to half
    hard = {2, 3, 8, 14, 19, 30}
    for draw in range(max(hard) + 1):
        pool = []
        for _side in range(2):
            decay, size = rng.uniform(2, 60, (9, 1)), 10 ** rng.uniform(-6, -1, (9, 1))
            energy = size * (np.exp(-np.arange(256) / decay) + 1e-4 * rng.random((9, 256)))
            pool.append(Units(energy, np.repeat([32, 16, 16], 3)))
        if draw not in hard:
            continue
        left = []
        for bits in (1.0, 1.5, 2.0):
            budget = round(bits * 64 * 512 * 3)
            widths, _ = allocate_planes(pool, budget, curve, 8)
            assert 0.9 * budget < spent_bits(pool, widths, 8) <= budget
            left.append(
                sum(
                    float((units.energy * curve[w]).sum(1) @ units.tokens)
                    for units, w in zip(pool, widths, strict=True)
                )
            )
        assert left[0] > left[1] > left[2]
