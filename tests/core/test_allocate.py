"""Water-filling against every allocation there is, and against the continuous solution that bounds it."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.core.allocate import exponential_curves, quarter_powers, reverse_waterfill, waterfill
from aatc_cli.errors import AatcError

# Greedy widths leave the levels of all spending channels within a factor 4 of each other, the continuous solution
# makes them equal to their geometric mean: the arithmetic mean exceeds it at most by Specht's ratio of 4.
SPECHT_4 = 4 ** (1 / 3) / (math.e * math.log(4 ** (1 / 3)))


def every_allocation(channels: int, max_bits: int, min_bits: int = 0) -> np.ndarray:
    return np.array(list(itertools.product(range(min_bits, max_bits + 1), repeat=channels)))


def totals(curves: np.ndarray, allocations: np.ndarray) -> np.ndarray:
    """Summed distortion of every allocation, in exact arithmetic for curves of integers."""
    return sum(curves[channel][allocations[:, channel]] for channel in range(len(curves)))


def convex_curves(rng: np.random.Generator, kind: str, channels: int, max_bits: int) -> np.ndarray:
    """Convex falling curves [n, max + 1] whose entries are integers up to 2^40, so that sums and ties are exact."""
    if kind == "exponential":
        return np.round(np.exp2(rng.uniform(0, 30, channels)))[:, None] * 4.0 ** np.arange(max_bits, -1, -1)
    gains = {
        "random": lambda: rng.integers(0, 1_000_000, (channels, max_bits)),
        "ties": lambda: rng.integers(0, 3, (channels, max_bits)),
        "linear": lambda: np.repeat(rng.integers(0, 3, (channels, 1)), max_bits, axis=1),
    }[kind]()
    gains = -np.sort(-gains, axis=1)
    gains[rng.random(channels) < 0.2] = 0
    tail = np.cumsum(gains[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate([tail, np.zeros((channels, 1))], axis=1) + rng.integers(0, 5, (channels, 1))


@pytest.mark.parametrize("kind", ["exponential", "random", "ties", "linear"])
def test_waterfill_is_the_best_of_all_allocations(kind):
    """Least distortion; among equals the fewest bits; among those the most bits to the lowest channels."""
    rng = np.random.default_rng(0)
    for _ in range(150):
        channels, max_bits = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        min_bits = int(rng.integers(0, max_bits + 1)) if rng.random() < 0.4 else 0
        curves = convex_curves(rng, kind, channels, max_bits)
        budget = int(rng.integers(min_bits * channels, max_bits * channels + 3))
        allocations = every_allocation(channels, max_bits, min_bits)
        allocations = allocations[allocations.sum(1) <= budget]
        distortion = totals(curves, allocations)
        best = allocations[distortion == distortion.min()]
        best = best[best.sum(1) == best.sum(1).min()]
        np.testing.assert_array_equal(waterfill(curves, budget, min_bits), max(map(tuple, best)))


def relaxed(curves, budget, widths) -> tuple[float, float]:
    """Least distortion when steps may be bought in part, and the whole gain of the one step that was (0: none)."""
    steps = [
        ((row[low] - row[high]) / (high - low), high - low)
        for row in curves
        for low, high in itertools.pairwise(widths)
    ]
    left, distortion = budget - widths[0] * len(curves), sum(row[widths[0]] for row in curves)
    for gain, size in sorted(steps, reverse=True):
        if gain > 0 and size > left:
            return distortion - gain * left, gain * size if left else 0.0
        left, distortion = left - size, distortion - gain * size
        if left <= 0:
            break
    return distortion, 0.0


@pytest.mark.parametrize("kind", ["exponential", "random"])
@pytest.mark.parametrize(
    "widths", [(0, 1, 2, 4), (0, 2, 4), (0, 1, 2, 3, 4), (1, 4), (0, 3), (2,), (0, 1, 4), (0, 2, 3, 4)], ids=str
)
def test_some_widths_alone(kind, widths):
    """Against all allocations: the best where the relaxed problem buys whole steps, within one step of it elsewhere."""
    rng = np.random.default_rng(2)
    whole = 0
    for _ in range(80):
        channels = int(rng.integers(1, 6))
        curves = convex_curves(rng, kind, channels, 4)
        budget = int(rng.integers(widths[0] * channels, 4 * channels + 3))
        allocations = np.array(list(itertools.product(widths, repeat=channels)))
        optimum = totals(curves, allocations)[allocations.sum(1) <= budget].min()
        bits = waterfill(curves, budget, widths=widths)
        assert set(bits.tolist()) <= set(widths)
        assert bits.sum() <= budget
        found, (bound, broken) = totals(curves, bits[None])[0], relaxed(curves, budget, widths)
        assert bound <= optimum <= found <= bound + broken
        whole += broken == 0
    assert whole > 20, "no case was exact"


def test_a_step_that_does_not_fit_leaves_its_bits_to_the_next():
    curves = np.array([[100.0, 60.0, 40.0, 20.0, 0.0], [50.0, 20.0, 12.0, 6.0, 0.0], [9.0, 3.0, 2.0, 1.0, 0.0]])
    # gains per bit: 40, 20, 20 (two bits); 30, 8, 6; 6, 1, 1
    assert waterfill(curves, 4, widths=(0, 1, 2, 4)).tolist() == [2, 2, 0]
    assert waterfill(curves, 5, widths=(0, 1, 2, 4)).tolist() == [4, 1, 0]
    assert waterfill(curves, 3, widths=(0, 1, 2, 4)).tolist() == [2, 1, 0]
    assert waterfill(curves, 100, widths=(0, 1, 2)).tolist() == [2, 2, 2]
    with pytest.raises(AatcError, match="cannot give 3 channels 1 bits each"):
        waterfill(curves, 2, widths=(1, 4))


def test_waterfill_on_real_valued_curves():
    rng = np.random.default_rng(1)
    for _ in range(100):
        channels, budget = int(rng.integers(1, 6)), int(rng.integers(0, 22))
        gains = -np.sort(-rng.exponential(size=(channels, 4)) * np.exp2(rng.uniform(-20, 20, (channels, 1))), axis=1)
        curves = np.concatenate([np.cumsum(gains[:, ::-1], axis=1)[:, ::-1], np.zeros((channels, 1))], axis=1)
        allocations = every_allocation(channels, 4)
        distortion = totals(curves, allocations)
        bits = waterfill(curves, budget)
        assert bits.sum() <= budget
        assert totals(curves, bits[None])[0] == pytest.approx(distortion[allocations.sum(1) <= budget].min(), rel=1e-12)
        if bits.sum() > 0:
            assert totals(curves, bits[None])[0] < distortion[0]


def test_exponential_curves_are_energy_times_powers_of_a_quarter():
    energy = np.array([3.0, 0.0, 1e-5])
    expected = [[value / 4**b for b in range(17)] for value in energy.tolist()]
    np.testing.assert_array_equal(exponential_curves(energy, 16), expected)
    assert quarter_powers(np.array([0, 1, 16])).tolist() == [1.0, 0.25, 2.0**-32]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(-40, 40), min_size=1, max_size=40), st.floats(0.05, 1))
def test_budget_is_spent_to_the_last_bit(logs, share):
    energy = np.exp2(np.array(logs))
    budget = int(share * 16 * energy.size)
    assert waterfill(exponential_curves(energy, 16), budget).sum() == budget
    assert waterfill(exponential_curves(energy, 16), 16 * energy.size + 7).tolist() == [16] * energy.size


def test_zero_energy_gets_nothing():
    energy = np.array([0.0, 1.0, 0.0, 1e-300, 2.0])
    bits = waterfill(exponential_curves(energy, 4), 1000)
    assert bits.tolist() == [0, 4, 0, 4, 4]
    assert waterfill(exponential_curves(np.zeros(6), 4), 24).sum() == 0
    assert waterfill(exponential_curves(energy, 4), 1000, min_bits=1).tolist() == [1, 4, 1, 4, 4]


def test_ties_go_to_the_lower_index():
    bits = waterfill(exponential_curves(np.full(7, 0.3), 16), 7 * 2 + 3)
    assert bits.tolist() == [3, 3, 3, 2, 2, 2, 2]
    # a linear curve ties with itself too: the first channel takes everything it can
    assert waterfill(np.array([[3.0, 2.0, 1.0, 0.0]] * 3), 5).tolist() == [3, 2, 0]


def test_equal_minimum_and_maximum_leave_no_choice():
    assert waterfill(exponential_curves(np.array([1.0, 5.0]), 4), 100, min_bits=4).tolist() == [4, 4]


def test_minimum_bits_beyond_the_budget_are_refused():
    curves = exponential_curves(np.ones(8), 16)
    assert waterfill(curves, 16, min_bits=2).tolist() == [2] * 8
    with pytest.raises(AatcError, match="15 bits cannot give 8 channels 2 bits") as raised:
        waterfill(curves, 15, min_bits=2)
    assert "min_bits" in str(raised.value.hint)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-20, 20), min_size=1, max_size=30), st.integers(1, 120))
def test_integer_distortion_is_bounded_by_the_continuous_one(logs, budget):
    energy = np.exp2(np.array(logs))
    bits, _ = reverse_waterfill(energy, budget)
    widths = waterfill(exponential_curves(energy, 200), budget)
    bound, reached = math.fsum(energy * 4.0**-bits), math.fsum(energy * quarter_powers(widths))
    assert bound * (1 - 1e-9) <= reached <= SPECHT_4 * bound * (1 + 1e-9)


def test_integer_penalty_of_half_a_bit_each():
    """Equal energies at half a bit per channel: (1/4 + 1)/2 against 1/2."""
    bits, _ = reverse_waterfill(np.ones(10), 5)
    widths = waterfill(exponential_curves(np.ones(10), 16), 5)
    assert np.sum(quarter_powers(widths)) / np.sum(4.0**-bits) == pytest.approx(1.25, rel=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=1, max_size=30), st.floats(0, 300), st.integers(0, 3))
def test_reverse_waterfill_meets_its_conditions(logs, budget, zeros):
    """Budget spent, covered channels at the level, the others below it: with convexity, that is optimality."""
    energy = np.concatenate([np.exp2(np.array(logs)), np.zeros(zeros)])
    bits, level = reverse_waterfill(energy, budget)
    assert bits.sum() == pytest.approx(budget, rel=1e-9, abs=1e-9)
    assert (bits >= 0).all()
    assert (bits[energy == 0] == 0).all()
    left = energy * 4.0**-bits
    np.testing.assert_allclose(left[bits > 1e-9], level, rtol=1e-9)
    assert (left <= level * (1 + 1e-9)).all()


@pytest.mark.parametrize(("channels", "budget", "energy"), [(1, 3.0, 5.0), (8, 20.0, 0.25), (100, 0.5, 7.0)])
def test_reverse_waterfill_of_equal_energies(channels, budget, energy):
    bits, level = reverse_waterfill(np.full(channels, energy), budget)
    np.testing.assert_allclose(bits, budget / channels, rtol=1e-9)
    assert level == pytest.approx(energy * 4 ** (-budget / channels), rel=1e-12)


def test_reverse_waterfill_at_the_edges():
    assert reverse_waterfill(np.zeros(3), 5.0)[1] == 0.0
    for budget in (0.0, 1e-30):
        bits, level = reverse_waterfill(np.array([1.0, 3.0, 0.0, 3.0]), budget)
        assert bits.sum() <= 1e-12
        assert level == pytest.approx(3.0, rel=1e-12)
    # smaller than the smallest normal number: a ratio of 4 is still one bit
    bits, _ = reverse_waterfill(np.array([2.0**-1040, 2.0**-1042]), 5.0)
    assert bits.tolist() == pytest.approx([3.0, 2.0], abs=1e-9)


def test_a_whole_model_is_planned_without_a_loop_over_channels():
    """32 layers of 2048 channels. Calls are counted and not seconds: there are far fewer of them than channels."""
    energy = np.exp2(np.random.default_rng(2).normal(0, 6, 65_536))
    curves, calls = exponential_curves(energy, 16), []
    sys.setprofile(lambda frame, event, what: calls.append(event))
    try:
        bits = waterfill(curves, 2 * energy.size)
    finally:
        sys.setprofile(None)
    assert len(calls) < 5_000
    assert bits.sum() == 2 * energy.size
    assert bits.max() > 6
    assert bits.min() == 0


SCRIPT = """
import hashlib, numpy as np
from aatc_cli.core.allocate import SiteEnergy
from aatc_cli.profiles import load_recipe
rng = np.random.default_rng(0)
site = lambda: SiteEnergy(np.exp2(rng.normal(0, 5, 1024)), np.exp2(rng.normal(0, 3, 1024)))
energies = [{"k": site(), "v": site()} for _ in range(12)]
for name in ("paper", "per-layer", "global"):
    plan = load_recipe(name).choices.allocate(energies, 2.3)
    digest = hashlib.sha256(b"".join(layer[side].tobytes() for layer in plan.bits for side in ("k", "v")))
    print(name, digest.hexdigest(), repr(plan.predicted), repr(plan.water_level))
"""


def test_a_plan_does_not_depend_on_the_thread_count():
    outputs = []
    for threads in ("1", "2"):
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads)
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=Path(__file__).parents[2],
            env=os.environ | limits,
            capture_output=True,
            check=True,
        )
        outputs.append(ran.stdout)
    assert outputs[0] == outputs[1]
    assert len({line.split()[1] for line in outputs[0].splitlines()}) == 3  # three recipes, three plans
