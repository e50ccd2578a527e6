"""The byte law against the window rule played token by token, byte strings really built, and the paper's numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.layout import CacheLayout, exact_slots, fp16_bytes, packed_tokens
from aatc_cli.core.site_widths import SiteWidths, plane_counts
from aatc_cli.profiles import load_model_profile, load_recipe

PAPER_WINDOW, ONE = Window(), HeadGroups.both(1)
SMALL = Geometry(layers=2, heads=4, kv_heads=2, head_dim=6, hidden_size=24)


@st.composite
def windows(draw):
    recent = draw(st.integers(1, 24))
    return Window(sinks=draw(st.integers(0, 6)), recent=recent, flush=draw(st.integers(1, recent)))


def play(tokens: int, window: Window) -> tuple[int, int, int]:
    """Append one token after the other. -> tokens packed, sinks, most recent tokens ever left exact."""
    sinks, recent, packed, most = [], [], [], 0
    for token in range(tokens):
        (sinks if len(sinks) < window.sinks else recent).append(token)
        while len(recent) > window.recent:
            packed += [recent.pop(0) for _ in range(window.flush)]
        most = max(most, len(recent))
    assert [*sinks, *packed, *recent] == list(range(tokens))
    return len(packed), len(sinks), most


@settings(max_examples=300, deadline=None)
@given(windows(), st.integers(0, 150))
def test_packed_tokens_follow_the_window_rule(window, tokens):
    packed, sinks, most = play(tokens, window)
    assert packed_tokens(tokens, window) == packed
    assert exact_slots(tokens, window) == (sinks, most)


def test_paper_window_by_hand():
    """4 sinks, 128 recent, blocks of 16: the 133rd token is the first to push a block out."""
    packed = {0: 0, 4: 0, 132: 0, 133: 16, 148: 16, 149: 32, 8192: 8064}
    assert {tokens: packed_tokens(tokens, PAPER_WINDOW) for tokens in packed} == packed


COMP = [
    ("llama-3.1-8b-instruct", 4.0, 3.8),
    ("llama-3.1-8b-instruct", 3.0, 4.9),
    ("llama-3.1-8b-instruct", 2.5, 5.82),
    ("llama-3.1-8b-instruct", 2.0, 7.0),
    ("llama-3.1-8b-instruct", 1.5, 9.1),
    ("llama-3.1-8b-instruct", 1.0, 12.4),
    ("qwen2.5-7b-instruct", 4.0, 3.8),
    ("qwen2.5-7b-instruct", 3.0, 4.9),
    ("qwen2.5-7b-instruct", 2.5, 5.82),
    ("qwen2.5-7b-instruct", 2.0, 6.9),
]


@pytest.mark.parametrize(("name", "bits", "ratio"), COMP)
def test_papers_compression_ratios_at_8192_tokens(name, bits, ratio):
    profile = load_model_profile(name)
    layout = CacheLayout.nominal(profile.geometry, PAPER_WINDOW, HeadGroups.both(profile.head_groups), bits)
    assert layout.ratio(8192) == pytest.approx(ratio, rel=0.03)
    assert layout.bits_at(8192) == pytest.approx(16 / ratio, rel=0.03)


def test_papers_megabytes():
    profile = load_model_profile("llama-3.1-8b-instruct")
    assert profile.head_groups == 2
    layout = CacheLayout.nominal(profile.geometry, PAPER_WINDOW, HeadGroups.both(2), 2.5)
    assert layout.reference_bytes(8192) == 8192 * 32 * 2 * 1024 * 2
    assert layout.reference_bytes(8192) == pytest.approx(1.07e9, rel=0.005)
    assert layout.bytes(8192) == pytest.approx(184e6, rel=0.03)


def bit_rows(values: np.ndarray, count: int) -> np.ndarray:
    """The lowest ``count`` bits of every integer, least significant first: [..., n] -> [..., n * count]."""
    bits = (values[..., None] >> np.arange(count)) & 1
    return bits.reshape(*values.shape[:-1], values.shape[-1] * count).astype(np.uint8)


def plane_values(codes: np.ndarray, width: int) -> dict[int, np.ndarray]:
    """Cut codes of ``width`` bits into power-of-two planes, the widest plane from the lowest bits."""
    planes, shift = {}, 0
    for plane in (16, 8, 4, 2, 1):
        if width & plane:
            planes[plane] = (codes >> shift) & ((1 << plane) - 1)
            shift += plane
    assert shift == width
    return planes


def key_strings(codes: np.ndarray, widths: list[int]) -> list[bytes]:
    """One byte string per token and plane, over the channels that have the plane. codes [T, C] unsigned."""
    parts = [plane_values(codes[:, c], width) for c, width in enumerate(widths)]
    strings = []
    for plane in (16, 8, 4, 2, 1):
        held = [part[plane] for part in parts if plane in part]
        if held:
            strings += [np.packbits(row).tobytes() for row in bit_rows(np.stack(held, axis=1), plane)]
    return strings


def value_strings(codes: np.ndarray, widths: list[int], flush: int) -> list[bytes]:
    """One byte string per flush block, channel and plane, along the block's tokens."""
    strings = []
    for block in codes.reshape(-1, flush, codes.shape[1]):
        for c, width in enumerate(widths):
            strings += [np.packbits(bit_rows(p, n)).tobytes() for n, p in plane_values(block[:, c], width).items()]
    return strings


def test_planes_hold_every_bit_of_a_code():
    """The strings counted below are enough: codes come back from the key strings."""
    widths, rng = [0, 5, 16, 3, 7, 1], np.random.default_rng(0)
    codes = np.stack([rng.integers(0, 1 << width, 9) for width in widths], axis=1)
    strings = key_strings(codes, widths)
    back = np.zeros_like(codes)
    shift = np.zeros(len(widths), dtype=np.int64)
    for plane in (16, 8, 4, 2, 1):
        held = [c for c, width in enumerate(widths) if width & plane]
        for t in range(9 if held else 0):
            bits = np.unpackbits(np.frombuffer(strings.pop(0), np.uint8), count=len(held) * plane)
            back[t, held] |= (bits.reshape(len(held), plane).astype(np.int64) << np.arange(plane)).sum(1) << shift[held]
        shift[held] += plane
    np.testing.assert_array_equal(back, codes)
    assert strings == []


@settings(max_examples=60, deadline=None)
@given(
    windows(),
    st.integers(0, 90),
    st.sampled_from([(1, 1), (2, 2), (2, 1), (1, 2)]),
    st.sampled_from([8, 16]),
    st.integers(0, 2**32 - 1),
)
def test_bytes_are_those_of_byte_strings_really_built(window, tokens, groups, scale_bits, seed):
    scale = np.float16 if scale_bits == 16 else np.uint8
    rng = np.random.default_rng(seed)
    channels = SMALL.channels
    bits = [{side: rng.integers(0, 17, channels).tolist() for side in ("k", "v")} for _ in range(SMALL.layers)]
    packed, sinks, slots = play(tokens, window)
    built = {"k": 0, "v": 0, "scales": 0, "sinks": 0, "window": 0}
    for layer in bits:
        for side, widths in layer.items():
            codes = np.stack([rng.integers(0, 1 << width, packed) for width in widths], axis=1)
            strings = key_strings(codes, widths) if side == "k" else value_strings(codes, widths, window.flush)
            built[side] += sum(map(len, strings))
            built["scales"] += len(np.zeros((packed, groups[side == "v"]), scale).tobytes())
            built["sinks"] += len(np.zeros((sinks, channels), np.float16).tobytes())
            built["window"] += len(np.zeros((slots, channels), np.float16).tobytes())
    layout = CacheLayout.of_bits(SMALL, window, HeadGroups(k=groups[0], v=groups[1]), bits, scale_bits)
    parts = layout.breakdown(tokens)
    assert layout.bytes(tokens) == sum(built.values()) == sum(parts.values())
    assert parts["codes_keys"] + parts["codes_values"] + parts["padding"] == built["k"] + built["v"]
    assert parts["codes_keys"] == pytest.approx(packed * sum(sum(layer["k"]) for layer in bits) / 8, abs=0.5)
    assert parts["codes_values"] == pytest.approx(packed * sum(sum(layer["v"]) for layer in bits) / 8, abs=0.5)
    assert parts["padding"] >= 0
    assert (parts["token_scales"], parts["sinks"], parts["window"]) == (
        built["scales"],
        built["sinks"],
        built["window"],
    )


@pytest.mark.parametrize("width", range(17))
def test_uniform_widths_that_fill_their_bytes_have_no_padding(width):
    geometry = Geometry(layers=1, heads=2, kv_heads=2, head_dim=8, hidden_size=16)
    layout = CacheLayout.of_bits(geometry, Window(), ONE, [{"k": [width] * 16, "v": [width] * 16}])
    parts = layout.breakdown(1000)
    assert parts["padding"] == 0
    assert parts["codes_keys"] == parts["codes_values"] == packed_tokens(1000, Window()) * 16 * width // 8
    assert layout.breakdown(1000) == CacheLayout.nominal(geometry, Window(), ONE, width).breakdown(1000)
    assert sum(plane * count for plane, count in plane_counts([width] * 3).items()) == 3 * width


def test_zero_bit_channels_cost_nothing():
    some = SiteWidths.of([3, 9, 1], 16)
    assert SiteWidths.of([3, 0, 9, 1, 0, 0], 16) == some
    assert SiteWidths.of([0] * 50, 16) == SiteWidths(0.0, 0, 0.0, 0.0)
    silent = CacheLayout.of_bits(SMALL, Window(), HeadGroups.both(2), [{"k": [0] * 12, "v": [0] * 12}] * 2)
    parts = silent.breakdown(500)
    assert parts["codes_keys"] == parts["codes_values"] == parts["padding"] == 0
    assert silent.static_breakdown()["decode_matrices"] == 0


@settings(max_examples=30, deadline=None)
@given(windows(), st.integers(0, 2**32 - 1))
def test_bytes_never_fall_with_tokens_and_scale_with_the_batch(window, seed):
    rng = np.random.default_rng(seed)
    bits = [{side: rng.integers(0, 17, 12).tolist() for side in ("k", "v")} for _ in range(2)]
    layout = CacheLayout.of_bits(SMALL, window, HeadGroups(k=2, v=1), bits)
    sizes = [layout.bytes(tokens) for tokens in range(120)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
    assert sizes[-1] > sizes[10] > 0
    assert layout.bytes(77, batch=5) == 5 * layout.bytes(77)
    assert fp16_bytes(SMALL, 77, batch=5) == 5 * 77 * 2 * 2 * 12 * 2


def test_short_contexts_are_the_float16_cache():
    layout = CacheLayout.nominal(SMALL, PAPER_WINDOW, ONE, 2.0)
    for tokens in (1, 4, 132):
        assert layout.ratio(tokens) == 1.0
        assert layout.bits_at(tokens) == 16.0
    assert layout.ratio(133) < 1.0  # the first block is stored beside a window that stays allocated
    # two bytes of token scale beside three of codes: 24 / 5 at most
    assert 4.7 < layout.ratio(200_000) < 4.8


def test_static_bytes_and_summary():
    bits = [{"k": [1] * 5 + [0] * 7, "v": [2] * 12}, {"k": [0] * 12, "v": [4] * 3 + [0] * 9}]
    layout = CacheLayout.of_bits(SMALL, PAPER_WINDOW, HeadGroups(k=2, v=1), bits)
    coded = 5 + 12 + 0 + 3
    keys, values = np.zeros((5, 6), np.float16), np.zeros((12 + 3, 12), np.float16)
    scales, widths = np.zeros(coded, np.float32), np.zeros((2, 2, 12), np.uint8)
    static = layout.static_breakdown()
    assert static == {
        "decode_matrices": keys.nbytes + values.nbytes,
        "channel_scales": scales.nbytes,
        "widths": widths.nbytes,
    }
    summary = layout.summary(1000, batch=3)
    assert summary["bytes_total"] == 3 * layout.bytes(1000) == sum(layout.breakdown(1000, 3).values())
    assert summary["bytes_static"] == sum(static.values())
    assert summary["ratio"] == pytest.approx(layout.ratio(1000), rel=1e-12)
    assert summary["ratio_with_static"] == summary["bytes_fp16"] / (summary["bytes_total"] + summary["bytes_static"])


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
