"""Recipes over layers: normalisation, protection, pools, and a committed plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.errors import AatcError
from aatc_cli.methods.fields import Protection
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import load_recipe

GOLDEN = Path(__file__).parents[1] / "golden" / "allocation.json"
GOLDEN_CASES = [
    (name, bits) for name in ("paper", "var-only", "per-layer", "global", "uniform") for bits in (1.5, 2.25, 4.0)
]


def recipe(**changes) -> Recipe:
    settings = {"name": "test", "summary": "", "protect": Protection(layers=3, key_extra=1.0)}
    return Recipe(**(settings | {"normalize_percentile": 95.0} | changes))


def random_energies(seed: int, layers: int = 6, channels: int = 32):
    rng = np.random.default_rng(seed)

    def site() -> SiteEnergy:
        variance = np.sort(np.exp2(rng.normal(rng.normal(0, 4), 3, channels)))[::-1]
        return SiteEnergy(variance=variance, weight=np.exp2(rng.normal(rng.normal(0, 2), 2, channels)))

    return [{"k": site(), "v": site()} for _ in range(layers)]


def one_bit_at_a_time(energy: np.ndarray, budget: int, max_bits: int = 16) -> np.ndarray:
    """The allocation rule in its plainest form: always the channel that gains most, the first of equals."""
    bits = np.zeros(energy.size, dtype=np.int64)
    for _ in range(budget):
        gain = np.where(bits < max_bits, 0.75 * energy / 4.0**bits, 0.0)
        if gain.max() <= 0:
            break
        bits[np.argmax(gain)] += 1
    return bits


def over_percentile(values: np.ndarray, percentile: float) -> np.ndarray:
    """Divide by the linearly interpolated percentile, written out."""
    place = percentile / 100 * (values.size - 1)
    low = int(place)
    ordered = np.sort(values)
    return values / (ordered[low] + (place - low) * (ordered[min(low + 1, values.size - 1)] - ordered[low]))


def test_energy_of_the_paper_recipe():
    """sigma^2 and w^(K) are divided by the layer's own 95th percentile, w^(V) is not."""
    site = random_energies(0)[0]["k"]
    variance, weight = over_percentile(site.variance, 95), over_percentile(site.weight, 95)
    rtol = 1e-12
    np.testing.assert_allclose(recipe().choices.energy(site, "k"), variance * weight, rtol=rtol)
    np.testing.assert_allclose(recipe().choices.energy(site, "v"), variance * site.weight, rtol=rtol)
    np.testing.assert_allclose(recipe(key_weight="none").choices.energy(site, "k"), variance, rtol=rtol)
    np.testing.assert_allclose(recipe(value_weight="none").choices.energy(site, "v"), variance, rtol=rtol)
    plain = recipe(normalize_percentile=None).choices.energy(site, "k")
    np.testing.assert_array_equal(plain, site.variance * site.weight)


def test_normalisation_survives_a_percentile_of_zero():
    few = SiteEnergy(variance=np.array([0.0] * 39 + [8.0]), weight=np.ones(40))
    assert recipe().choices.energy(few, "k").tolist() == [0.0] * 39 + [1.0]
    dead = SiteEnergy(variance=np.zeros(40), weight=np.zeros(40))
    assert recipe().choices.energy(dead, "k").tolist() == [0.0] * 40


@pytest.mark.parametrize("bits", [1.5, 2.0, 2.53, 4.0])
def test_waterfill_recipe_is_protection_and_one_pool_per_side(bits):
    energies, chosen = random_energies(1), recipe()
    allocation = chosen.choices.allocate(energies, bits)
    total = int(bits * 6 * 32)
    for side, extra in (("k", 1.0), ("v", 0.0)):
        values = [chosen.choices.energy(layer[side], side) for layer in energies]
        widths = [layer[side] for layer in allocation.bits]
        share = int((bits + extra) * 32)
        for layer in range(3):
            np.testing.assert_array_equal(widths[layer], one_bit_at_a_time(values[layer], share))
        pooled = one_bit_at_a_time(np.concatenate(values[3:]), total - 3 * share)
        np.testing.assert_array_equal(np.concatenate(widths[3:]), pooled)
        assert sum(int(w.sum()) for w in widths) == total
        expected = sum(float(np.sum(v * 4.0**-w)) for v, w in zip(values, widths, strict=True))
        assert allocation.predicted[side] == pytest.approx(expected, rel=1e-12)


def test_the_water_level_divides_spending_from_silent_channels():
    energies = random_energies(2)
    allocation = recipe().choices.allocate(energies, 2.0)
    for side in ("k", "v"):
        pool = np.concatenate([recipe().choices.energy(layer[side], side) for layer in energies[3:]])
        widths = np.concatenate([layer[side] for layer in allocation.bits[3:]])
        level = allocation.water_level[side]
        # integer widths blur the level by a factor 4 either way
        assert (widths[pool > 4 * level] > 0).all()
        assert (widths[pool < level / 4] == 0).all()
        assert (pool > 4 * level).sum() > 5
        assert (pool < level / 4).sum() > 5


def test_per_layer_recipe_shares_the_budget_equally():
    energies, chosen = random_energies(3), recipe(allocator="per-layer")
    allocation = chosen.choices.allocate(energies, 2.3)
    total = int(2.3 * 6 * 32)
    for side, extra in (("k", 1.0), ("v", 0.0)):
        sums = [int(layer[side].sum()) for layer in allocation.bits]
        share = int((2.3 + extra) * 32)
        assert sums[:3] == [share] * 3
        assert sum(sums) == total
        assert max(sums[3:]) - min(sums[3:]) <= 1
        for layer in range(6):
            energy = chosen.choices.energy(energies[layer][side], side)
            np.testing.assert_array_equal(allocation.bits[layer][side], one_bit_at_a_time(energy, sums[layer]))


def test_global_recipe_has_one_profile_for_all_pooled_layers():
    energies, chosen = random_energies(4), recipe(allocator="global")
    allocation = chosen.choices.allocate(energies, 2.0)
    for side, left in (("k", 6 * 64 - 3 * 96), ("v", 6 * 64 - 3 * 64)):
        energy = sum(chosen.choices.energy(layer[side], side) for layer in energies[3:]) / 3
        for layer in allocation.bits[3:]:
            np.testing.assert_array_equal(layer[side], one_bit_at_a_time(energy, left // 3))


@pytest.mark.parametrize("bits", [2.0, 2.3, 16.0])
def test_uniform_recipe_ignores_the_energies(bits):
    """Widths that differ by at most one bit, the wider ones first; protection still counts."""
    allocation = recipe(allocator="uniform").choices.allocate(random_energies(11), bits)
    for side, extra in (("k", 1.0), ("v", 0.0)):
        assert sum(int(layer[side].sum()) for layer in allocation.bits) == int(bits * 6 * 32)
        for index, layer in enumerate(allocation.bits):
            widths = layer[side].tolist()
            assert widths == sorted(widths, reverse=True)
            assert widths[0] - widths[-1] <= 1
            if index < 3:
                assert sum(widths) == int(min(bits + extra, 16) * 32)


def test_keys_and_values_have_separate_budgets():
    energies = random_energies(5)
    louder = [{"k": layer["k"], "v": SiteEnergy(layer["v"].variance, 1e6 * layer["v"].weight)} for layer in energies]
    before, after = (recipe().choices.allocate(which, 2.0) for which in (energies, louder))
    for side in ("k", "v"):
        assert sum(int(layer[side].sum()) for layer in after.bits) == 2 * 6 * 32
        for a, b in zip(before.bits, after.bits, strict=True):
            np.testing.assert_array_equal(a[side], b[side])


def test_a_layers_activation_scale_does_not_matter_unless_normalisation_is_off():
    energies = random_energies(6)
    scaled = [dict(layer) for layer in energies]
    scaled[4]["k"] = SiteEnergy(4096.0 * energies[4]["k"].variance, energies[4]["k"].weight / 64)
    assert widths_of(recipe().choices.allocate(energies, 2.0)) == widths_of(recipe().choices.allocate(scaled, 2.0))
    raw = recipe(normalize_percentile=None)
    before, after = raw.choices.allocate(energies, 2.0), raw.choices.allocate(scaled, 2.0)
    assert after.bits[4]["k"].sum() > before.bits[4]["k"].sum()


def test_protection_that_cannot_be_paid_is_refused():
    energies = random_energies(7, layers=4)
    with pytest.raises(AatcError, match="1 bits over 4 layers cannot pay for 3 protected layers at 2 bits") as raised:
        recipe().choices.allocate(energies, 1.0)
    assert "[protect]" in str(raised.value.hint)
    assert recipe().choices.allocate(energies, 3.0).bits[3]["k"].sum() == 0  # exactly paid: 3 * 4 of 4 * 3
    assert recipe(protect=Protection()).choices.allocate(energies, 1.0).bits[0]["k"].size == 32


def test_a_model_of_protected_layers_only():
    """No budget pays for layers that are all to have more than the average: the remedy is another recipe."""
    energies = random_energies(8, layers=2)
    with pytest.raises(AatcError, match="cannot pay") as raised:
        recipe().choices.allocate(energies, 2.0)
    assert "raise the budget" not in str(raised.value.hint)
    even = recipe(protect=Protection(layers=3)).choices.allocate(energies, 2.0)
    assert [int(layer[side].sum()) for layer in even.bits for side in ("k", "v")] == [64] * 4
    # a budget above what the channels can hold is no reason to refuse it
    full = recipe(max_bits=8).choices.allocate(energies, 10.0)
    assert {width for layer in full.bits for side in ("k", "v") for width in layer[side].tolist()} == {8}
    assert full.water_level == {"k": 0.0, "v": 0.0}


def test_protection_stops_at_the_widest_width():
    allocation = recipe(max_bits=4).choices.allocate(random_energies(9), 3.5)
    assert (allocation.bits[0]["k"] == 4).all()
    assert sum(int(layer["k"].sum()) for layer in allocation.bits) == int(3.5 * 6 * 32)
    assert max(int(layer["k"].max()) for layer in allocation.bits) == 4


def test_min_bits_hold_everywhere():
    allocation = recipe(min_bits=1).choices.allocate(random_energies(10), 2.0)
    assert min(int(layer[side].min()) for layer in allocation.bits for side in ("k", "v")) == 1
    assert sum(int(layer["v"].sum()) for layer in allocation.bits) == 2 * 6 * 32


def widths_of(allocation):
    return [{side: layer[side].tolist() for side in ("k", "v")} for layer in allocation.bits]


def write_golden() -> None:
    energies = random_energies(2024, layers=5, channels=8)
    sites = [
        json.dumps({side: {"variance": s.variance.tolist(), "weight": s.weight.tolist()} for side, s in layer.items()})
        for layer in energies
    ]
    plans = [
        f"{json.dumps(f'{name} {bits:g}')}: {json.dumps(widths_of(load_recipe(name).choices.allocate(energies, bits)))}"
        for name, bits in GOLDEN_CASES
    ]
    text = '{\n"energies": [\n' + ",\n".join(sites) + '\n],\n"widths": {\n' + ",\n".join(plans) + "\n}\n}\n"
    GOLDEN.write_text(text, encoding="utf-8")


def test_golden_allocation():
    """Widths of a small model, committed. AATC_GENERATE_EXPECTED=1 writes the file; without it a missing one fails."""
    if os.environ.get("AATC_GENERATE_EXPECTED") == "1":
        write_golden()
    if not GOLDEN.is_file():
        pytest.fail(f"missing expected file {GOLDEN.name}: restore it, or make it with AATC_GENERATE_EXPECTED=1")
    golden = json.loads(GOLDEN.read_text("utf-8"))
    energies = [
        {side: SiteEnergy(np.array(site["variance"]), np.array(site["weight"])) for side, site in layer.items()}
        for layer in golden["energies"]
    ]
    assert list(golden["widths"]) == [f"{name} {bits:g}" for name, bits in GOLDEN_CASES]
    for name, bits in GOLDEN_CASES:
        assert widths_of(load_recipe(name).choices.allocate(energies, bits)) == golden["widths"][f"{name} {bits:g}"], (
            name,
            bits,
        )
