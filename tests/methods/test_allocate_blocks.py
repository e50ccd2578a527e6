"""Blocks of channels that share a width: against every allocation of blocks, and composed with the other axes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from aatc_cli.config import HeadGroups
from aatc_cli.core.allocate import SiteEnergy, channel_blocks
from aatc_cli.core.curves import DISTORTION_UNIFORM
from aatc_cli.errors import AatcError
from aatc_cli.methods.fields import Protection
from aatc_cli.methods.recipe import Recipe
from aatc_cli.profiles import load_recipe

SIDES = ("k", "v")


def recipe(**changes) -> Recipe:
    settings = {"name": "test", "summary": "", "key_weight": "fisher", "value_weight": "fisher", "curve": "uniform"}
    return Recipe(**(settings | changes))


def random_energies(seed: int, layers: int, channels: int):
    rng = np.random.default_rng(seed)

    def site() -> SiteEnergy:
        variance, fisher = np.exp2(rng.normal(0, 2, channels)), np.exp2(rng.normal(rng.normal(0, 1), 2, channels))
        return SiteEnergy(variance=variance, weight=np.exp2(rng.normal(0, 2, channels)), fisher=fisher)

    return [{"k": site(), "v": site()} for _ in range(layers)]


def blocks_of(energy: np.ndarray, groups: int, block: int) -> list[list[int]]:
    """Blocks of a site, written out: the loudest channels of a head group first, the lower of equals first."""
    size = energy.size // groups
    found = []
    for group in range(groups):
        order = sorted(range(group * size, (group + 1) * size), key=lambda c: (-energy[c], c))
        found += [order[i : i + block] for i in range(0, size, block)]
    return found


def all_blocks(energies, chosen: Recipe, groups: HeadGroups) -> list[tuple[int, str, list[int]]]:
    return [
        (layer, side, block)
        for side in SIDES
        for layer, sites in enumerate(energies)
        for block in blocks_of(chosen.choices.energy(sites[side], side), groups.of(side), chosen.block)
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pool", ["joint", "separate"])
@pytest.mark.parametrize("groups", [HeadGroups.both(1), HeadGroups.both(2), HeadGroups(k=2, v=1)], ids=str)
def test_same_as_brute_force(groups, pool, seed):
    """2 layers, 2 sides, 2 blocks of 2 channels at 0 to 3 bits: all 65536 allocations of blocks."""
    energies, chosen = random_energies(seed, 2, 4), recipe(pool=pool, block=2, max_bits=3)
    blocks, table = all_blocks(energies, chosen, groups), np.array(DISTORTION_UNIFORM)
    products = [energies[layer][side].variance * energies[layer][side].fisher / 2 for layer, side, _ in blocks]
    sums = np.array([product_[block].sum() for product_, (_, _, block) in zip(products, blocks, strict=True)])
    everything = np.array(list(product(range(4), repeat=8)))
    losses = (table[everything] * sums).sum(1)
    for budget in (0, 3, 5, 8, 13, 23, 24, 48):
        found = chosen.choices.allocate(energies, budget / 16, groups)
        fits = 2 * everything.sum(1) <= budget
        if pool == "separate":
            fits = (4 * everything[:, :4].sum(1) <= budget) & (4 * everything[:, 4:].sum(1) <= budget)
        widths = [found.bits[layer][side][block] for layer, side, block in blocks]
        assert all(len(set(run.tolist())) == 1 for run in widths)
        picked = np.array([run[0] for run in widths])
        assert (everything[fits] == picked).all(1).any(), "more than the budget, or no such widths"
        assert (table[picked] * sums).sum() == pytest.approx(losses[fits].min(), rel=1e-12)
        assert sum(found.predicted.values()) == pytest.approx(losses[fits].min(), rel=1e-12)


def test_blocks_are_by_falling_energy_within_a_head_group():
    energy = np.array([[1.0, 5.0, 3.0, 3.0], [9.0, 0.0, 9.0, 2.0]])
    assert channel_blocks(energy, 2).tolist() == [[1, 2], [3, 0], [4, 6], [7, 5]]
    assert channel_blocks(energy, 4).tolist() == [[1, 2, 3, 0], [4, 6, 7, 5]]


def test_equal_blocks_give_bits_to_the_first():
    site = SiteEnergy(np.ones(8), np.ones(8), np.ones(8))
    found = recipe(block=2, pool="joint").choices.allocate([{"k": site, "v": site}], 1.0, HeadGroups(k=2, v=1))
    assert found.bits[0]["k"].tolist() == [1] * 8
    assert found.bits[0]["v"].tolist() == [1] * 8
    fewer = recipe(block=2, pool="joint").choices.allocate([{"k": site, "v": site}], 0.7, HeadGroups(k=2, v=1))
    # 11 bits are five of the eight blocks
    assert fewer.bits[0]["k"].tolist() == [1] * 8
    assert fewer.bits[0]["v"].tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("curve", ["exponential", "lloyd", "uniform"])
@pytest.mark.parametrize("bits", [0.6, 2.0, 3.37])
def test_blocks_of_one_are_channels(curve, bits):
    """Head groups do not matter without blocks."""
    energies = random_energies(5, 3, 12)
    for pool in ("joint", "separate"):
        one = recipe(curve=curve, pool=pool).choices.allocate(energies, bits)
        other = recipe(curve=curve, pool=pool).choices.allocate(energies, bits, HeadGroups(k=3, v=2))
        coarse = recipe(curve=curve, pool=pool, block=4).choices.allocate(energies, bits, HeadGroups(k=3, v=1))
        assert one.predicted == other.predicted
        for a, b in zip(one.bits, other.bits, strict=True):
            assert all(a[side].tolist() == b[side].tolist() for side in SIDES)
        assert sum(one.predicted.values()) < sum(coarse.predicted.values())


@pytest.mark.parametrize("widths", [None, (0, 2, 3, 8)])
@pytest.mark.parametrize("allocator", ["waterfill", "per-layer", "global", "uniform"])
@pytest.mark.parametrize("layers", [0, 2])
def test_blocks_go_with_every_allocator_protection_and_choice_of_widths(allocator, widths, layers):
    energies, groups = random_energies(6, 5, 24), HeadGroups(k=3, v=2)
    chosen = recipe(
        allocator=allocator,
        widths=widths,
        max_bits=8,
        block=4,
        protect=Protection(layers=layers, key_extra=1.0),
        key_weight="query",
        value_weight="output",
        normalize_percentile=95.0,
    )
    found = chosen.choices.allocate(energies, 2.3, groups)
    for side in SIDES:
        total = sum(int(layer[side].sum()) for layer in found.bits)
        assert total <= 2.3 * 5 * 24
        assert total >= 0.9 * 2.3 * 5 * 24
        for layer, sites in enumerate(energies):
            bits = found.bits[layer][side]
            assert set(bits.tolist()) <= set(chosen.allowed_widths)
            # every width of a head group fills blocks
            for share in np.split(bits, groups.of(side)):
                assert (np.bincount(share) % 4 == 0).all()
            if allocator in ("waterfill", "per-layer") or (layer < layers and allocator == "global"):
                energy = chosen.choices.energy(sites[side], side)
                for block in blocks_of(energy, groups.of(side), 4):
                    assert len(set(bits[block].tolist())) == 1
            if layer < layers and widths is None:
                assert bits.sum() == int((2.3 + (side == "k")) * 24 / 4) * 4


@pytest.mark.parametrize("name", ["loss-aware-fused", "paper-fused"])
def test_the_packaged_recipes(name):
    """What the fused kernels need: heads alone, blocks of 16, at most 8 bits, 64 tokens at a time, even levels."""
    chosen = load_recipe(name)
    assert (chosen.key_groups, chosen.value_groups, chosen.block, chosen.max_bits) == ("per-head", "per-head", 16, 8)
    assert (chosen.window.sinks, chosen.window.recent, chosen.window.flush) == (4, 128, 64)
    assert chosen.quantizer in ("uniform", "uniform-token-max")
    found = chosen.choices.allocate(random_energies(7, 6, 96), 2.5, HeadGroups.both(2))
    spread = set()
    for layer in found.bits:
        for share in (part for side in SIDES for part in np.split(layer[side], 2)):
            assert (np.bincount(share) % 16 == 0).all()
            spread |= set(share.tolist())
    assert len(spread) > 3
    assert max(spread) <= 8


def test_blocks_that_do_not_fill_head_groups_are_refused():
    energies = random_energies(8, 2, 24)
    with pytest.raises(AatcError, match="16 channels at a time, which do not divide the 24 of a head group") as caught:
        recipe(block=16).choices.allocate(energies, 2.0)
    assert "block" in str(caught.value.hint)
    with pytest.raises(AatcError, match="which do not divide the 12 of a head group"):
        recipe(block=8).choices.allocate(energies, 2.0, HeadGroups(k=1, v=2))
    assert recipe(block=8).choices.allocate(energies, 2.0, HeadGroups(k=1, v=3)).bits[0]["k"].size == 24


def test_a_budget_below_the_narrowest_width_is_refused():
    energies = random_energies(9, 2, 8)
    with pytest.raises(AatcError, match="a budget of 8 bits cannot give 16 channels 1 bits each"):
        recipe(block=4, min_bits=1).choices.allocate(energies, 0.7)
