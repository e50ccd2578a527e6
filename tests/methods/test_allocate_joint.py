"""One pool over keys and values of all layers, with the quantizer's own curve and Fisher weights."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from pydantic import ValidationError

from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.core.curves import DISTORTION
from aatc_cli.errors import AatcError
from aatc_cli.methods.fields import Protection
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import load_recipe


def joint(**changes) -> Recipe:
    settings = {"name": "test", "summary": "", "key_weight": "fisher", "value_weight": "fisher", "pool": "joint"}
    return Recipe(**(settings | {"curve": "lloyd"} | changes))


def random_energies(seed: int, layers: int, channels: int):
    rng = np.random.default_rng(seed)

    def site() -> SiteEnergy:
        variance, fisher = np.exp2(rng.normal(0, 2, channels)), np.exp2(rng.normal(rng.normal(0, 2), 2, channels))
        return SiteEnergy(variance=variance, weight=np.full(channels, np.nan), fisher=fisher)

    return [{"k": site(), "v": site()} for _ in range(layers)]


def flat(bits) -> np.ndarray:
    return np.concatenate([layer[side] for side in "kv" for layer in bits])


def products(energies) -> np.ndarray:
    return np.concatenate([layer[side].variance * layer[side].fisher for side in "kv" for layer in energies])


@pytest.mark.parametrize("curve", ["lloyd", "exponential"])
@pytest.mark.parametrize("seed", range(4))
def test_same_as_brute_force(curve, seed):
    """2 layers, 2 sides, 2 channels of 0 to 3 bits: all 65536 allocations."""
    energies = random_energies(seed, layers=2, channels=2)
    table = np.array([DISTORTION[b] if curve == "lloyd" else 0.25**b for b in range(4)])
    energy = products(energies) / 2
    everything = np.array(list(product(range(4), repeat=8)))
    losses = (table[everything] * energy).sum(1)
    for budget in (0, 1, 5, 8, 13, 24):
        found = joint(curve=curve, max_bits=3).choices.allocate(energies, budget / 8)
        widths = flat(found.bits)
        best = losses[everything.sum(1) <= budget].min()
        assert widths.sum() == budget
        assert (table[widths] * energy).sum() == pytest.approx(best, rel=1e-12)
        assert sum(found.predicted.values()) == pytest.approx(best, rel=1e-12)
        assert found.predicted["k"] == pytest.approx((table[widths[:4]] * energy[:4]).sum(), rel=1e-12)


def test_one_budget_over_both_sides():
    energies = random_energies(5, layers=3, channels=16)
    for layer in energies:
        layer["v"] = SiteEnergy(layer["v"].variance * 4**3, layer["v"].weight, layer["v"].fisher)
    found = joint().choices.allocate(energies, 2.3)
    keys, values = (sum(int(layer[side].sum()) for layer in found.bits) for side in "kv")
    assert keys + values == int(np.floor(2.3 * 96))
    apart = joint(pool="separate").choices.allocate(energies, 2.3)
    separate = [sum(int(layer[side].sum()) for layer in apart.bits) for side in "kv"]
    assert separate == [110, 110]
    # three bits' worth of energy more: about a bit and a half of width goes from keys to values
    assert values - keys > 96
    assert sum(found.predicted.values()) < sum(apart.predicted.values())
    assert found.water_level["k"] == found.water_level["v"]
    assert apart.water_level["k"] != apart.water_level["v"]


def test_energy_is_half_of_variance_times_fisher_without_normalisation():
    site = random_energies(6, 1, 8)[0]["k"]
    for side, percentile in product(("k", "v"), (None, 95.0)):
        found = joint(normalize_percentile=percentile).choices.energy(site, side)
        np.testing.assert_array_equal(found, site.variance * site.fisher / 2)


def test_curves_are_the_quantizers_own():
    curves = joint(max_bits=9).choices.channel_curves(np.array([2.0, 5.0]))
    np.testing.assert_allclose(curves, np.outer([2.0, 5.0], DISTORTION[:10]), rtol=1e-15)
    exponential = joint(curve="exponential", max_bits=4).choices.channel_curves(np.array([2.0]))
    assert exponential[0].tolist() == [2.0, 0.5, 0.125, 0.03125, 0.0078125]


@pytest.mark.parametrize("fisher", [None, np.zeros(4)], ids=["absent", "zero"])
@pytest.mark.parametrize("pool", ["joint", "separate"])
def test_without_gradients_it_says_how_to_get_them(fisher, pool):
    energies = random_energies(7, 2, 4)
    energies[1]["v"] = SiteEnergy(np.ones(4), np.ones(4), fisher)
    with pytest.raises(AatcError, match="test weighs by loss gradients") as caught:
        joint(pool=pool).choices.allocate(energies, 2.0)
    assert "--fisher" in str(caught.value.hint)


@pytest.mark.parametrize(
    "changes",
    [{"allocator": "per-layer"}, {"allocator": "uniform"}, {"allocator": "global"}, {"protect": Protection(layers=1)}],
)
def test_joint_needs_waterfill_and_no_protection(changes):
    with pytest.raises(ValidationError, match='pool "joint" needs'):
        joint(**changes)
    assert joint(**changes | {"pool": "separate"}).pool == "separate"


def test_the_packaged_recipe():
    recipe = load_recipe("loss-aware")
    axes = (recipe.transform, recipe.key_weight, recipe.value_weight, recipe.pool, recipe.curve, recipe.quantizer)
    assert axes == ("metric", "fisher", "fisher", "joint", "lloyd", "lloyd")
    assert recipe.normalize_percentile is None
    energies = random_energies(8, 4, 32)
    found = recipe.choices.allocate(energies, 1.5)
    assert flat(found.bits).sum() == 4 * 2 * 32 * 1.5
    # what water-filling means: no gain left unspent exceeds one that was spent
    curves = np.outer(products(energies), DISTORTION)
    widths, rows = flat(found.bits), np.arange(256)
    bought = (curves[rows, widths - 1] - curves[rows, widths])[widths > 0]
    left = curves[rows, widths] - curves[rows, widths + 1]
    assert bought.min() >= left.max()
