"""MixKVQ against its definition: salience from tokens, tiers by two thresholds, channels kept as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.core.grouped import GroupedMinMax
from aatc_cli.core.mixed import MixedMinMax, channel_salience, tiers
from aatc_cli.errors import AatcError
from aatc_cli.methods.allocators.salience import RATIO
from aatc_cli.profiles import load_recipe

RECIPE = load_recipe("mixkvq")
GEOMETRY = Geometry(layers=2, heads=4, kv_heads=2, head_dim=32, hidden_size=64)


def test_salience_is_query_size_times_step() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(70, 8, generator=generator)
    queries = torch.randn(40, 2, 4, generator=generator).double()
    moment = torch.einsum("thd,the->hde", queries, queries) / 40
    found = channel_salience(rows, moment, 32, 2)
    for channel in range(8):
        ranges = [float(np.ptp(rows[first : first + 32, channel].double().numpy())) for first in (0, 32)]
        size = float((queries[:, channel // 4, channel % 4] ** 2).mean().sqrt())
        assert float(found[channel]) == pytest.approx(size * np.mean(ranges) / 3, rel=1e-9)


def by_thresholds(salience: np.ndarray, level: float) -> np.ndarray:
    return np.where(salience >= RATIO * level, 16, np.where(salience >= level, 4, 2))


@pytest.mark.parametrize("mean", [2.0, 2.3, 3.0, 6.0, 16.0])
def test_tiers_are_the_lowest_threshold_that_is_paid(mean: float) -> None:
    salience = np.random.default_rng(7).lognormal(sigma=1.2, size=60)
    budget = int(mean * 60)
    found = tiers(salience, budget, (2, 4, 16), RATIO)
    assert found.sum() <= budget
    paid = [level for level in salience if by_thresholds(salience, level).sum() <= budget]
    expected = by_thresholds(salience, min(paid)) if paid else np.full(60, 2)
    assert np.array_equal(found, expected)


def test_budgets_are_shared_out_over_layers() -> None:
    rng = np.random.default_rng(1)
    tables = [rng.lognormal(size=64), 50 * rng.lognormal(size=64)]
    flat = SiteEnergy(np.ones(64), np.ones(64))
    found = RECIPE.choices.allocator.allocate(
        RECIPE.choices, [{"k": flat, "v": flat}] * 2, 2.5, HeadGroups.both(1), tables
    ).bits
    assert all(set(layer["v"].tolist()) == {2} for layer in found)
    assert found[0]["k"].mean() < found[1]["k"].mean()
    assert 2.9 < np.mean([layer["k"].mean() for layer in found]) <= 3.0
    with pytest.raises(AatcError, match=r"mixkvq begins at 2 bits, 1\.5 are too few"):
        RECIPE.choices.allocator.allocate(RECIPE.choices, [{"k": flat, "v": flat}], 1.5, HeadGroups.both(1), tables)


def test_channels_of_16_bits_are_float16_and_the_rest_kivis() -> None:
    x = torch.randn(1, 70, 6, generator=torch.Generator().manual_seed(4))
    bits = torch.tensor([2, 16, 4, 2, 16, 4])
    found = MixedMinMax(GroupedMinMax(bits, 32, "channel")).reconstruct(x)
    whole = bits == 16
    assert torch.equal(found[..., whole], x[..., whole].half().float())
    alone = GroupedMinMax(bits[~whole], 32, "channel").reconstruct(x[..., ~whole])
    assert torch.equal(found[..., ~whole], alone)


def test_bytes_by_hand() -> None:
    keys = [16] * 4 + [4] * 12 + [2] * 48
    law = RECIPE.choices.layout(GEOMETRY, HeadGroups.both(1), [[{"k": keys, "v": [2] * 64}] * 2])
    found = law.breakdown(4 + 128 + 32)
    assert found["codes_keys"] == 2 * 32 * sum(keys) // 8
    # a scale for 32 tokens of each of the 60 channels that are coded; of values two for each of 32 tokens
    assert found["key_scales"] == found["key_minima"] == 2 * 60 * 2
    assert found["value_scales"] == 2 * 32 * 2 * 2
    assert law.static_breakdown() == {"widths": 2 * 64}


def test_what_it_cannot_be() -> None:
    for change in ({"widths": [2, 4, 8], "max_bits": 8}, {"coding": {"key_axis": "token", "group": 32}}):
        with pytest.raises(ValueError, match=r"salience|mixed-minmax"):
            type(RECIPE).model_validate(RECIPE.model_dump() | change)
