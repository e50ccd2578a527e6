"""The forms that decoding works in: keys with tokens side by side, sums of value latents, any size of tile."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.packed import attention
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.store import LayerView

HEADS, DIM = 4, 6
CHANNELS = HEADS * DIM


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rope", ["half", "interleaved", "none"])
@pytest.mark.parametrize("rotary", [6, 4, 2])
@pytest.mark.parametrize("tokens", [1, 16, 33])
def test_keys_are_rotated_in_place_as_the_model_rotates_them(rope, rotary, tokens):
    stored = normal(2, HEADS, DIM, tokens)
    angles = normal(tokens, rotary // 2, seed=1)
    twice = torch.cat((angles, angles), -1) if rope == "half" else angles.repeat_interleave(2, -1)
    # as the models with scaled attention have them: not of unit modulus
    cos, sin = 1.3 * twice.cos(), 1.3 * twice.sin()
    expected = apply_rope(stored.transpose(2, 3).clone(), cos[None], sin[None], rope)
    attention._rotate(stored.transpose(2, 3), cos, sin, rope)
    torch.testing.assert_close(stored.transpose(2, 3), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("quantizer", ["uniform-token-max", "lloyd", "uniform"])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("flush", "blocks"), [(16, 4), (16, 5), (5, 7), (1, 3), (3, 1)])
def test_value_sums_are_weighted_latents(codec, quantizer, groups, flush, blocks):
    # widths of every kind, the Lloyd-Max tables as well as the even steps above them
    bits = [16, 1, 0, 9, 2, 3, 7, 8, 4, 5, 6, 12, 0, 1, 2, 3, 8, 1, 10, 2, 7, 4, 0, 15]
    site = SiteCodec("v", codec(CHANNELS, groups, bits, 3, quantizer=quantizer), None, flush)
    x = normal(2, blocks * flush, CHANNELS)
    data, _ = site.encode(x)
    weights = normal(2, HEADS, 3, blocks * flush, seed=1)
    found = site.value_sums(data, weights)
    share = HEADS // groups
    for group, latents in enumerate(site.value_latents(data)):
        mine = weights[:, group * share : (group + 1) * share]
        torch.testing.assert_close(found[group], mine @ latents[:, None], rtol=1e-12, atol=1e-12)
    # and the latents are the codec's own, up to the token scale: the independent way through its codes
    codes, alpha = site.codec.quantize(site.codec.latents(x))
    unit = site.codec.dequantize(codes, torch.ones_like(alpha)) @ torch.block_diag(*site.codec.decode)
    size = CHANNELS // groups
    for group, latents in enumerate(site.value_latents(data)):
        vectors = latents @ site.rows[group]
        expected = unit[..., group * size : (group + 1) * size]
        torch.testing.assert_close(vectors, expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_default_tile_gives_what_small_tiles_give(codec, batch, monkeypatch):
    window = Window(sinks=3, recent=16, flush=8)
    pair = [SiteCodec(side, codec(CHANNELS, 2, "mixed", i), normal(CHANNELS), 8) for i, side in enumerate("kv")]
    store = PackedStore(*pair, window, batch, torch.float64)
    rows = normal(batch, 300, CHANNELS)
    store.append(rows, rows.flip(1))
    angles = torch.arange(300)[:, None] * normal(3).repeat(2)

    def tables(first, count):
        return angles[first : first + count].cos(), angles[first : first + count].sin()

    query, seen = normal(batch, 2 * HEADS, 1, DIM, seed=2), []
    small = attention.packed_attention(query, store.stored(), LayerView(0.4, tables), tile=8)
    original = SiteCodec.keys
    monkeypatch.setattr(SiteCodec, "keys", lambda self, data, *a: seen.append(data.shape) or original(self, data, *a))
    monkeypatch.setattr(attention, "TILE", 64)
    got = attention.packed_attention(query, store.stored(), LayerView(0.4, tables))
    torch.testing.assert_close(got, small, rtol=1e-12, atol=1e-12)
    # the bound is on all sequences together
    assert max(shape[0] * shape[1] for shape in seen) <= 64
    assert sum(shape[1] for shape in seen) == store.packed
