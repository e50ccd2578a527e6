"""What memory is counted: storages once and whole, widths of an exact mean, peaks that come and go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.evals.memory.peak import Peak, storage_bytes
from aatc_cli.evals.memory.synthetic import random_widths

MIB = 1 << 20


def test_a_storage_counts_once_and_whole():
    whole = torch.zeros(1000, dtype=torch.float16)
    other = torch.zeros(30, dtype=torch.uint8)
    assert storage_bytes([whole]) == 2000
    # a view keeps all of its storage alive
    assert storage_bytes([whole[:10], whole[5:7], whole.view(10, 100)]) == 2000
    assert storage_bytes([whole[:10].clone(), other, torch.empty(0)]) == 50


@settings(max_examples=80, deadline=None)
@given(
    channels=st.integers(1, 200),
    bits=st.floats(0, 16),
    low=st.integers(0, 3),
    high=st.integers(4, 16),
    seed=st.integers(0, 99),
)
def test_random_widths_have_the_mean_that_was_asked_for(channels, bits, low, high, seed):
    bits = min(max(bits, low), high)
    widths = random_widths(channels, bits, low, high, torch.Generator().manual_seed(seed))
    assert len(widths) == channels
    assert sum(widths) == round(channels * bits)
    assert all(low <= width <= high for width in widths)
    assert widths == random_widths(channels, bits, low, high, torch.Generator().manual_seed(seed))


def test_random_widths_differ_from_one_another():
    assert len(set(random_widths(512, 2.5, 0, 16, torch.Generator().manual_seed(0)))) > 4


def test_a_peak_is_seen_after_it_has_passed_and_forgotten_after_a_restart():
    peak = Peak("cpu")
    base = peak.restart()
    if base is None:
        pytest.skip("this system does not reset the peak of a process")
    large = torch.ones(96 * MIB, dtype=torch.uint8)
    del large
    assert 90 * MIB < peak.read() - base < 128 * MIB
    base = peak.restart()
    assert peak.read() - base < 16 * MIB
