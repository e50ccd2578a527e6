"""Bytes of pressed caches against tensors that hold what is left and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout, packed_tokens
from aatc_cli.core.overheads import Overheads
from aatc_cli.core.pack_plan import pack_plan
from aatc_cli.core.packing import pack_keys, pack_values
from aatc_cli.core.press.choice import kept_count
from aatc_cli.core.press.layout import PressLayout
from aatc_cli.profiles import load_recipe

GEOMETRY = Geometry(layers=3, heads=4, kv_heads=2, head_dim=16, hidden_size=64)
WINDOW = Window(sinks=4, recent=32, flush=16)
GROUPS = HeadGroups.both(2)
TOKENS = 4 + 160 + 32
NEAR = 36 * GEOMETRY.layers * 2 * GEOMETRY.channels * 2


def widths(seed: int = 0) -> list[dict[str, list[int]]]:
    drawn = torch.Generator().manual_seed(seed)
    return [
        {side: torch.randint(0, 6, (GEOMETRY.channels,), generator=drawn).tolist() for side in SIDES}
        for _ in range(GEOMETRY.layers)
    ]


def law(bits, keep: float, sums: bool = False, at_end: bool = False, overheads: Overheads | None = None) -> PressLayout:
    whole = CacheLayout.of_bits(GEOMETRY, WINDOW, GROUPS, bits, 8)
    if overheads is not None:
        whole = CacheLayout(GEOMETRY, WINDOW, GROUPS, whole.widths, 16, overheads)
    return PressLayout.of(whole, bits, keep, sums=sums, at_end=at_end)


def by_hand(bits, counts, sums: bool) -> int:
    """Bytes of streams that are packed: codes of every head's own tokens, scales of 8 bits, masks, sums."""
    total = NEAR
    for layer, heads in zip(bits, counts, strict=True):
        for head, count in enumerate(heads):
            span = slice(head * 16, (head + 1) * 16)
            keys, values = torch.tensor(layer["k"][span]), torch.tensor(layer["v"][span])
            blocks = -(-count // WINDOW.flush)
            codes = torch.zeros(blocks, WINDOW.flush, 16, dtype=torch.int32)
            total += pack_keys(codes.flatten(0, 1)[:count], pack_plan(layer["k"][span], WINDOW.flush)).numel()
            total += pack_values(codes, pack_plan(layer["v"][span], WINDOW.flush)).numel()
            total += count * (int(keys.any()) + int(values.any()))
            total += np.packbits(np.zeros(160, dtype=bool)).nbytes
            total += torch.zeros(count + 36).nbytes if sums else 0
    return total


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("keep", [1.0, 0.25, 0.3, 0.01])
def test_bytes_are_those_of_streams_that_hold_the_kept_tokens(keep, sums):
    bits = widths()
    found = law(bits, keep, sums)
    counts = [[kept_count(160, keep)] * 2] * 3
    assert found.kept(160) == counts
    assert found.bytes(TOKENS) == by_hand(bits, counts, sums)
    assert sum(found.breakdown(TOKENS).values()) == found.bytes(TOKENS)


def test_found_shares_stand_in_for_even_ones():
    bits, shares = widths(1), [[0.1, 0.4], [0.25, 0.25], [0.5, 0.0]]
    found = law(bits, 0.25).of_prompt(TOKENS, shares)
    assert found.bytes(TOKENS) == by_hand(bits, [[16, 64], [40, 40], [80, 0]], False)
    mean = sum(
        share * sum(sum(bits[layer][side][head * 16 : (head + 1) * 16]) for side in SIDES)
        for layer, heads in enumerate(shares)
        for head, share in enumerate(heads)
    )
    assert found.mean_bits == pytest.approx(mean / (2 * 3 * 32))


def test_what_comes_behind_a_prompt_is_kept_whole():
    bits = widths(2)
    found = law(bits, 0.25, at_end=True).of_prompt(TOKENS)
    assert found.bytes(TOKENS) == law(bits, 0.25).bytes(TOKENS)
    later = TOKENS + 48
    assert found.kept(packed_tokens(later, WINDOW)) == [[40 + 48] * 2] * 3
    assert law(bits, 0.25).of_prompt(TOKENS).kept(208) == [[52] * 2] * 3


def test_bits_packed_are_all_there_is_by_number_of_the_text():
    bits = [{side: [4] * 32 for side in SIDES}] * 3
    # codes of 4 bits and a scale of 8 for 16 numbers, a quarter of the tokens, and a bit for 32 numbers of all
    assert law(bits, 0.25).bits_packed == pytest.approx(0.25 * (4 + 8 / 16) + 1 / 32)
    assert law(bits, 0.25, sums=True).bits_packed == pytest.approx(0.25 * (4 + 8 / 16 + 32 / 32) + 1 / 32)
    half = law([{side: [16] * 32 for side in SIDES}] * 3, 0.125, overheads=Overheads({}))
    assert half.bits_packed == pytest.approx(2 + 1 / 32)
    summed = law([{side: [16] * 32 for side in SIDES}] * 3, 0.125, sums=True, overheads=Overheads({}))
    assert summed.bits_packed == pytest.approx(half.bits_packed + 0.125)


def test_overheads_go_with_the_tokens_that_are_left():
    recipe = load_recipe("per-token+h2o-0.25")
    bits = [{side: [2] * 32 for side in SIDES}] * 3
    found = recipe.choices.layout(GEOMETRY, GROUPS, [bits], 0, 0.25)
    whole = load_recipe("per-token").choices.layout(GEOMETRY, GROUPS, [bits])
    tokens = 4 + 160 + 128
    for cause in ("key_scales", "value_minima"):
        assert found.breakdown(tokens)[cause] * 4 == whole.breakdown(tokens)[cause]


def test_a_nominal_law_takes_heads_for_alike():
    recipe = load_recipe("loss-aware+snapkv-0.25")
    found = recipe.choices.nominal_layout(GEOMETRY, GROUPS, 4.0)
    assert found.bits_packed == pytest.approx(0.25 * (4 + 1) + 1 / 32)
    assert pack_plan is not None
