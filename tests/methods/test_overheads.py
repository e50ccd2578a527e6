"""Bytes of published methods by hand arithmetic, and the paper's compression ratios of those it ran."""

from __future__ import annotations

import pytest

from aatc_cli.config import Geometry, HeadGroups
from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout
from aatc_cli.profiles import load_model_profile, load_recipe

# 2 layers, 4 kv heads of 32: C = 128
GEOMETRY = Geometry(layers=2, heads=8, kv_heads=4, head_dim=32, hidden_size=256)
# 4 sinks and 128 recent are exact; 160 tokens behind them are packed at this length under flush 16 and 32 alike
TOKENS, PACKED = 4 + 160 + 128, 160
EXACT = (4 + 128) * 2 * 2 * 128 * 2


def layout(name: str, width: int, groups: int = 4, blocks: int = 0, kept: int = 128) -> CacheLayout:
    widths = [width] * kept + [0] * (128 - kept)
    bits = [dict.fromkeys(SIDES, widths)] * 2
    return load_recipe(name).choices.layout(GEOMETRY, HeadGroups.both(groups), [bits], blocks)


def parts(found: CacheLayout) -> dict[str, int]:
    """The breakdown without what every method has."""
    breakdown = found.breakdown(TOKENS)
    assert breakdown.pop("sinks") + breakdown.pop("window") == EXACT
    assert breakdown.pop("padding") == 0
    return breakdown


def codes(width: int, kept: int = 128) -> dict[str, int]:
    each = PACKED * 2 * kept * width // 8
    return {"codes_keys": each, "codes_values": each}


def test_kivi():
    # a scale and a minimum of 2 bytes for 32 tokens of a channel, or for 32 channels of a token: 1 bit per number
    each = 2 * (PACKED * 128 * 2 // 32)
    found = layout("kivi", 2)
    assert parts(found) == codes(2) | dict.fromkeys(("key_scales", "key_minima", "value_scales", "value_minima"), each)
    assert found.static_breakdown() == {}
    assert found.bytes(TOKENS) == EXACT + PACKED * 4 * 128 * 3 // 8


def test_per_token_and_per_channel():
    # heads of 32 make groups as large as those of 32 tokens
    for name in ("per-token", "per-channel"):
        each = 2 * (PACKED * 128 * 2 // 32)
        assert parts(layout(name, 4)) == codes(4) | dict.fromkeys(
            ("key_scales", "key_minima", "value_scales", "value_minima"), each
        )


def test_kvquant():
    # 1 %: 41 of the 32 * 128 keys of a block, 2 of the 128 values of a token, 2 bytes each with places of 4; a centre
    # and a half-width per token of values
    found = layout("kvquant", 3)
    outliers = 2 * (PACKED // 32 * 41 + PACKED * 2) * 6
    assert parts(found) == codes(3) | {"outliers": outliers, "value_ranges": PACKED * 2 * 4}
    assert found.static_breakdown() == {"signposts": 4 * 8 * 2, "key_ranges": 2 * 128 * 4}


def test_palu():
    # one group of 4 heads, 96 of 128 latents at 4 bits, one scale and minimum per token and group
    found = layout("palu", 4, groups=1, kept=96)
    each = PACKED * 2 * 2
    assert parts(found) == codes(4, 96) | dict.fromkeys(
        ("key_scales", "key_minima", "value_scales", "value_minima"), each
    )
    assert found.static_breakdown() == {"decode_matrices": 4 * 96 * 128 * 2}


@pytest.mark.parametrize(("name", "span"), [("kvtc", 128), ("kvtc-global", 256)])
def test_kvtc(name, span):
    found = layout(name, 2, groups=1, blocks=7, kept=64)
    assert parts(found) == codes(2, 64) | {"block_scales": PACKED * 7 * 2}
    assert found.static_breakdown() == {"decode_matrices": 4 * 64 * span * 2, "means": 4 * 128 * 2}


def test_oscar_and_ratequant():
    each = 2 * PACKED * 2 * 4
    for name in ("oscar", "ratequant"):
        assert parts(layout(name, 2)) == codes(2) | dict.fromkeys(
            ("key_scales", "key_minima", "value_scales", "value_minima"), each
        )
    assert layout("oscar", 2).static_breakdown() == {"decode_matrices": 4 * 128 * 32 * 2}
    assert layout("ratequant", 2).static_breakdown() == {}


def test_norms_floats_and_libraries():
    assert parts(layout("turboquant", 2)) == codes(2) | {"norms": PACKED * 4 * 4 * 2}
    assert parts(layout("fp8", 8)) == codes(8)
    for name in ("quanto", "hqq"):
        pairs = PACKED * 4 * 128 // 64
        assert parts(layout(name, 4)) == codes(4) | {"scales": 2 * pairs, "zero_points": 2 * pairs}


# Comp. columns of the paper's tables "bits per channel" and "main results", Llama-3.1-8B-Instruct
PAPER = {
    ("kivi", 4): 3.1,
    ("kivi", 3): 3.8,
    ("kivi", 2): 5.0,
    ("kivi", 1): 7.1,
    ("kvquant", 4): 3.4,
    ("kvquant", 3): 4.3,
    ("kvquant", 2): 5.91,
    ("palu", 2.8): 5.39,
}


@pytest.mark.parametrize(("name", "bits"), PAPER, ids=str)
def test_the_papers_ratios(name, bits):
    profile, recipe = load_model_profile("llama-3.1-8b-instruct"), load_recipe(name)
    groups = recipe.head_groups(8, HeadGroups.both(profile.head_groups))
    found = recipe.choices.nominal_layout(profile.geometry, groups, bits)
    assert found.ratio(8192) == pytest.approx(PAPER[name, bits], rel=0.02)


def test_bits_of_kivi_in_full():
    profile = load_model_profile("smollm2-135m-instruct")
    found = load_recipe("kivi").choices.nominal_layout(profile.geometry, HeadGroups.both(1), 2)
    packed = sum(count for cause, count in found.breakdown(10_000_132).items() if cause not in ("sinks", "window"))
    assert 8 * packed / (10_000_000 * 2 * 30 * 192) == pytest.approx(3.0, rel=1e-5)
