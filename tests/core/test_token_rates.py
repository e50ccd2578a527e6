"""Token classes: costs and thresholds by counting, the split of the bits by brute force, bytes by counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.allocate import SiteEnergy, reverse_waterfill
from aatc_cli.core.curves import DISTORTION
from aatc_cli.core.layout import CacheLayout, fp16_bytes, packed_tokens
from aatc_cli.core.rated import received_table
from aatc_cli.core.received import PROBES, bin_costs, bin_edges, probe_sums, received_bins
from aatc_cli.core.received_bins import BINS
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.token_classes import TokenClasses, token_classes
from aatc_cli.errors import AatcError
from aatc_cli.methods.choices import MethodTables
from aatc_cli.profiles import load_recipe

RECIPE = load_recipe("loss-aware-tokens")
ONE = HeadGroups.both(1)


def energies_of(layers: int, channels: int, seed: int = 0):
    random = np.random.default_rng(seed)

    def site():
        spread = 10.0 ** random.uniform(-3, 2, channels)
        return SiteEnergy(spread, np.ones(channels), random.uniform(0.5, 2, channels))

    return [{side: site() for side in SIDES} for _ in range(layers)]


def classes_of(counts, costs) -> TokenClasses:
    counts = np.array(counts, dtype=np.int64)
    return TokenClasses(np.zeros((len(counts), counts.shape[1] - 1)), counts, {s: np.array(costs[s]) for s in SIDES})


def test_bins_are_half_octaves():
    edges = bin_edges().numpy()
    assert edges.shape == (BINS - 1,)
    assert np.allclose(np.log2(edges), -24 + np.arange(1, BINS) / 2, rtol=0, atol=1e-15)
    found = received_bins(torch.tensor([0.0, 2.0**-24, 1.0, 1.5, 2.0, 1e9]))
    assert found.tolist() == [0, 0, 48, 49, 50, BINS - 1]


def test_costs_of_bins_are_traces():
    """Hutchinson's estimate against tr(M^-1 G) itself; exact where G is M but for its size."""
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(96, 96, generator=generator, dtype=torch.float64) + 20 * torch.eye(96, dtype=torch.float64)
    size = torch.rand(4000, generator=generator, dtype=torch.float64) * 3
    g = torch.randn(4000, 96, generator=generator, dtype=torch.float64) @ mix * size[:, None]
    bins = received_bins(size)
    metric = g.T @ g / 4000
    costs = bin_costs(probe_sums(bins, g), metric)
    inverse = torch.linalg.inv(metric)
    for b in bins.unique().tolist():
        product = inverse @ (g[bins == b].T @ g[bins == b])
        # variance of z A z^T for signs z: twice the squares off the diagonal of the symmetric part
        even = (product + product.T) / 2
        deviation = (2 * (even.square().sum() - even.diagonal().square().sum()) / PROBES).sqrt()
        assert abs(costs[b] - product.trace()) < 4 * deviation + 1e-3 * product.trace()
        if (bins == b).sum() > 400:
            assert deviation < 0.15 * product.trace()
    assert float(costs.sum()) == pytest.approx(4000 * 96, rel=1e-3)
    assert probe_sums(bins, g).shape == (BINS, 96, PROBES)


def test_table_of_a_layer_counts_tokens_and_shares_of_the_metric():
    geometry = Geometry(layers=1, heads=2, kv_heads=1, head_dim=8, hidden_size=16)
    stats = LayerStats.empty(geometry, 4, torch.zeros(1, 8, 8))
    generator = torch.Generator().manual_seed(0)
    received, readers = torch.rand(500, generator=generator), 300
    g = {side: torch.randn(500, 8, generator=generator) * (1 + 3 * received[:, None]) for side in SIDES}
    for half in (slice(0, 200), slice(200, 500)):
        for side in SIDES:
            stats.add_gradients(side, g[side][half])
            stats.add_received(side, received[half], g[side][half])
    stats.readers = readers
    table = received_table(stats, 0.0)
    assert table[0].sum() == 500
    assert torch.equal(table[0], torch.bincount(received_bins(received), minlength=BINS).double())
    assert table[1:].sum(1).tolist() == pytest.approx([1.0, 1.0], rel=1e-3)
    assert set(LayerStats.empty(geometry, 4, torch.zeros(1, 8, 8)).tensors()) == set(LayerStats.TENSORS) - set(
        LayerStats.OPTIONAL
    )


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.2, 0.3, 0.5), (0.25,) * 4])
def test_thresholds_part_the_tokens_by_share(shares):
    random = np.random.default_rng(1)
    r = 10.0 ** random.uniform(-5, 0, 3000)
    cost = r * random.exponential(size=3000)
    bins = received_bins(torch.from_numpy(r)).numpy()
    table = np.stack([np.bincount(bins, w, BINS) for w in (np.ones(3000), cost, cost**2)])
    found = token_classes([table, table], shares)
    assert np.array_equal(found.thresholds[0], found.thresholds[1])
    chosen = np.searchsorted(found.thresholds[0], r, side="right")
    assert np.bincount(chosen).tolist() == found.counts[0].tolist()
    # no edge of the grid lies nearer to the wanted share
    for k, edge in enumerate(found.thresholds[0]):
        wanted = 3000 * sum(shares[: k + 1])
        best = min(abs((r < e).sum() - wanted) for e in bin_edges().numpy())
        assert abs((r < edge).sum() - wanted) == best
    for side, weight in (("k", cost), ("v", cost**2)):
        means = [weight[chosen == k].mean() / weight.mean() for k in range(len(shares))]
        assert found.costs[side][0].tolist() == pytest.approx(means)
        assert float(found.shares[0] @ found.costs[side][0]) == pytest.approx(1.0)


def test_too_few_bins_are_refused():
    table = np.zeros((3, BINS))
    table[:, 40:42] = 5.0
    assert token_classes([table], (0.5, 0.5)).counts.tolist() == [[5, 5]]
    with pytest.raises(AatcError, match="layer 1 received tells fewer than 3 classes"):
        token_classes([np.ones((3, BINS)), table], (0.3, 0.3, 0.4))


def brute_force(energies, classes, budget: int, top: int) -> float:
    """The least sum of count * cost * energy * D(b) over all widths 0 .. top of one layer within the budget."""
    rows = [
        (count, count * classes.costs[side][0][k] * 0.5 * variance * fisher)
        for side in SIDES
        for k, count in enumerate(classes.counts[0].tolist())
        for variance, fisher in zip(energies[0][side].variance, energies[0][side].fisher, strict=True)
    ]
    best = {0: 0.0}
    for count, energy in rows:
        further: dict[int, float] = {}
        for (spent, value), width in itertools.product(best.items(), range(top + 1)):
            cost = spent + count * width
            if cost <= budget:
                total = value + energy * DISTORTION[width]
                further[cost] = min(further.get(cost, math.inf), total)
        best = further
    return min(best.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("counts", [[5, 5, 5], [2, 3, 7]])
def test_split_of_the_bits_is_the_best_there_is(seed, counts):
    random = np.random.default_rng(seed)
    energies = energies_of(1, 3, seed)
    costs = {side: [10.0 ** random.uniform(-1, 1, 3)] for side in SIDES}
    classes = classes_of([counts], costs)
    recipe = RECIPE.model_copy(update={"max_bits": 5})
    total = 6 * sum(counts)
    for average in (0.4, 1.0, 2.2):
        found = recipe.choices.allocate(energies, average, ONE, MethodTables(classes=classes))
        budget = math.floor(average * total)
        spent = sum(counts[k] * int(widths.sum()) for side in SIDES for k, widths in enumerate(found.bits[0][side]))
        assert spent <= budget
        got = sum(found.predicted.values()) * sum(counts)
        best = brute_force(energies, classes, budget, 5)
        assert got >= best * (1 - 1e-12)
        if len(set(counts)) == 1:
            assert got == pytest.approx(best, rel=1e-12)
        else:
            # steps of unequal price: at most the last of them is lost
            assert got <= brute_force(energies, classes, budget - max(counts), 5) * (1 + 1e-12)


def test_equal_costs_give_every_class_the_same_widths():
    energies = energies_of(3, 8)
    classes = classes_of([[10, 10]] * 3, {side: [[1.0, 1.0]] * 3 for side in SIDES})
    plain = load_recipe("loss-aware").choices.allocate(energies, 2.0)
    found = RECIPE.choices.allocate(energies, 2.0, ONE, MethodTables(classes=classes))
    for layer, widths in zip(found.bits, plain.bits, strict=True):
        for side in SIDES:
            assert (np.abs(layer[side] - widths[side]) <= 1).all()
    assert sum(found.predicted.values()) == pytest.approx(sum(plain.predicted.values()), rel=0.05)


def test_a_class_that_costs_nothing_is_dropped():
    classes = classes_of([[10, 30]] * 2, {side: [[0.0, 4 / 3]] * 2 for side in SIDES})
    found = RECIPE.choices.allocate(energies_of(2, 8), 1.0, ONE, MethodTables(classes=classes))
    assert all(not layer[side][0].any() and layer[side][1].any() for layer in found.bits for side in SIDES)
    mean = sum(int(layer[side][1].sum()) for layer in found.bits for side in SIDES) * 0.75 / 32
    assert mean == pytest.approx(1.0, abs=0.03)


def test_continuous_level_with_prices():
    random = np.random.default_rng(5)
    energy, prices = 10.0 ** random.uniform(-3, 3, 40), random.integers(1, 9, 40)
    bits, level = reverse_waterfill(energy, 300.0, prices)
    assert float(prices @ bits) == pytest.approx(300.0)
    assert np.allclose(bits, np.maximum(np.log2(energy / level) / 2, 0))
    repeated, same = reverse_waterfill(np.repeat(energy, prices), 300.0)
    assert same == pytest.approx(level)
    assert np.allclose(np.repeat(bits, prices), repeated)


def counted_bytes(bits, shares, packed: int, flush: int) -> tuple[int, int]:
    """Stored codes and scales of one layer, plane by plane and block by block."""
    stored = scales = 0
    edges = [round(packed * sum(shares[:k])) for k in range(len(shares))] + [packed]
    for k, layer in enumerate(bits):
        tokens = edges[k + 1] - edges[k]
        for side in SIDES:
            scales += 2 * tokens if any(layer[side]) else 0
            for plane in (16, 8, 4, 2, 1):
                having = sum(bool(width & plane) for width in layer[side])
                if side == "k":
                    stored += sum(-(-having * plane // 8) for _ in range(tokens))
                else:
                    stored += having * len(range(0, tokens, flush)) * -(-flush * plane // 8)
    return stored, scales


@pytest.mark.parametrize("tokens", [100, 132, 150, 1000, 8192])
def test_bytes_are_those_of_streams_counted_one_by_one(tokens):
    geometry = Geometry(layers=2, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
    random = np.random.default_rng(0)
    shares = [[0.3, 0.3, 0.4], [0.1, 0.65, 0.25]]
    bits = [
        [{side: random.integers(0, 9, 16).tolist() if k else [0] * 16 for side in SIDES} for _ in range(2)]
        for k in range(3)
    ]
    layout = RECIPE.choices.layout(geometry, ONE, bits, shares)
    packed = packed_tokens(tokens, RECIPE.window)
    counted = [counted_bytes([b[layer] for b in bits], shares[layer], packed, 16) for layer in range(2)]
    parts = layout.breakdown(tokens)
    assert parts["codes_keys"] + parts["codes_values"] + parts["padding"] == sum(stored for stored, _ in counted)
    assert parts["token_scales"] == sum(scales for _, scales in counted)
    # two bits of tag for one of three classes: four bytes per block of 16 tokens and layer
    assert parts["class_tags"] == 2 * packed // 16 * 4
    assert layout.bytes(tokens) == sum(parts.values())
    mean = np.mean(
        [
            sum(shares[layer][k] * np.mean(bits[k][layer][side]) for k in range(3))
            for layer in range(2)
            for side in SIDES
        ]
    )
    assert layout.mean_bits == pytest.approx(float(mean))
    assert layout.with_shares([[1.0, 0.0, 0.0]] * 2).mean_bits == 0.0
    # the slope of the law, which a single block would not show: five streams would each begin a block
    many = 2_000_000
    slope = 16.0 * (layout.bytes(2 * many) - layout.bytes(many)) / fp16_bytes(geometry, many)
    assert layout.bits_packed == pytest.approx(slope, rel=1e-4)
    static = layout.static_breakdown()
    alive = {
        (layer, side): sum(any(b[layer][side][c] for b in bits) for c in range(16))
        for layer in range(2)
        for side in SIDES
    }
    assert static["decode_matrices"] == sum(alive.values()) * 16 * 2
    assert static["widths"] == 3 * 2 * 2 * 16
    assert static["thresholds"] == 2 * 2 * 4


def test_window_of_eight_bits_by_counting():
    geometry = Geometry(layers=3, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
    recipe = load_recipe("loss-aware")
    narrow = recipe.model_copy(update={"window": Window(key_bits=8, value_bits=8)})
    half = recipe.model_copy(update={"window": Window(value_bits=8)})
    bits = [{side: [2] * 16 for side in SIDES}] * 3
    wide, held = (r.choices.layout(geometry, ONE, [bits]).breakdown(1000) for r in (recipe, narrow))
    # 16 bytes and two float16 scales in place of 32 bytes
    assert wide["window"] == 128 * 6 * 32
    assert held["window"] == 128 * 6 * 20
    assert held["sinks"] == 4 * 6 * 20
    assert half.choices.layout(geometry, ONE, [bits]).breakdown(1000)["window"] == 128 * 3 * (32 + 20)
    assert {k: v for k, v in held.items() if k not in ("window", "sinks")} == {
        k: v for k, v in wide.items() if k not in ("window", "sinks")
    }


def test_nominal_law_counts_tags():
    geometry = Geometry(layers=3, heads=4, kv_heads=2, head_dim=8, hidden_size=32)
    plain = CacheLayout.nominal(geometry, RECIPE.window, ONE, 2.0)
    found = RECIPE.choices.nominal_layout(geometry, ONE, 2.0)
    packed = packed_tokens(8192, RECIPE.window)
    # three bits for one of five classes: six bytes per block of 16 tokens and layer
    assert found.breakdown(8192)["class_tags"] == 3 * packed // 16 * 6
    assert found.breakdown(8192)["codes_keys"] == plain.breakdown(8192)["codes_keys"]
    paper = load_recipe("paper")
    assert paper.choices.nominal_layout(geometry, ONE, 2.0) == CacheLayout.nominal(geometry, paper.window, ONE, 2.0)
