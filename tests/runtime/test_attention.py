"""Attention tile by tile over the packed store against the full computation it stands for."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core.rope import apply_rope
from aatc_cli.runtime.packed import attention as module
from aatc_cli.runtime.packed.attention import packed_attention
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.store import LayerView

HEADS, SHARE, DIM, BATCH = 4, 3, 6, 2
CHANNELS = HEADS * DIM
SCALING = 0.4


def case(codec, window, length, dtype, groups=2, bits="mixed", rotary=DIM, bias=True, quantizer="uniform-token-max"):
    """A filled store, its rows, rotation tables of ``rotary`` dimensions, and a source of further random tensors."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    pair = [
        SiteCodec(
            side,
            codec(CHANNELS, groups, bits, i, dtype=dtype, quantizer=quantizer),
            normal(CHANNELS) if bias else None,
            window.flush,
        )
        for i, side in enumerate(("k", "v"))
    ]
    keys, values = normal(BATCH, length, CHANNELS), normal(BATCH, length, CHANNELS)
    store = PackedStore(*pair, window, BATCH, dtype)
    store.append(keys, values)
    angles = (torch.arange(length + 64)[:, None] * torch.rand(rotary // 2, generator=generator)).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return store, pair, (keys, values), (cos, sin), normal


def by_head(x):
    return x.view(*x.shape[:2], HEADS, DIM).transpose(1, 2)


def full(query, pair, rows, rotation, window, packed, fresh=None, sliding_window=None):
    """The obvious computation: the whole history dequantized and rotated, one softmax over all of it."""
    hats = []
    for site, x in zip(pair, rows, strict=True):
        bias = 0 if site.bias is None else site.bias
        hat = x.clone()
        span = slice(window.sinks, window.sinks + packed)
        hat[:, span] = site.codec.reconstruct(x[:, span] - bias) + bias
        hats.append(by_head(hat))
    length = rows[0].shape[1]
    k = apply_rope(hats[0], rotation[0][None, :length], rotation[1][None, :length])
    v = hats[1]
    first = length - 1
    if fresh is not None:
        k, v, first = torch.cat((k, fresh[0]), 2), torch.cat((v, fresh[1]), 2), length
    k, v = k.repeat_interleave(SHARE, 1), v.repeat_interleave(SHARE, 1)
    scores = query @ k.transpose(2, 3) * SCALING
    distance = (first + torch.arange(query.shape[2]))[:, None] - torch.arange(k.shape[2])
    hidden = distance < 0
    if sliding_window is not None:
        hidden |= distance >= sliding_window
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


WINDOW = Window(sinks=3, recent=16, flush=8)
CASES = [
    pytest.param({"length": 1}, id="T1"),
    pytest.param({"length": 3}, id="sinks-only"),
    pytest.param({"length": 19}, id="window-full"),
    pytest.param({"length": 20}, id="one-block"),
    pytest.param({"length": 150}, id="many-tiles"),
    pytest.param({"length": 150, "groups": 1}, id="one-group"),
    pytest.param({"length": 150, "groups": 4, "bias": False}, id="four-groups-no-bias"),
    pytest.param({"length": 150, "rotary": 4}, id="partial-rope"),
    pytest.param({"length": 150, "bits": 0}, id="zero-bits"),
    pytest.param({"length": 150, "bits": 3, "quantizer": "lloyd"}, id="lloyd"),
    pytest.param({"length": 150, "quantizer": "lloyd"}, id="lloyd-mixed"),
]


# float32: scores and sums of about 150 terms of unit size, so a few hundred roundings of 6e-8
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 5e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("sliding_window", [None, 20, 45])
def test_tiles_equal_the_full_computation(codec, dtype, tolerance, settings, queries, sliding_window):
    store, pair, rows, rotation, normal = case(codec, WINDOW, dtype=dtype, **settings)
    length = settings["length"]
    query = normal(BATCH, HEADS * SHARE, queries, DIM)
    fresh = (normal(BATCH, HEADS, queries, DIM), normal(BATCH, HEADS, queries, DIM)) if queries > 1 else None
    expected = full(query, pair, rows, rotation, WINDOW, store.packed, fresh, sliding_window)

    def tables(first, count):
        return rotation[0][first : first + count], rotation[1][first : first + count]

    for tile in (8, 20, 512):
        view = LayerView(SCALING, tables, sliding_window=sliding_window)
        got = packed_attention(query, store.stored(), view, fresh, tile)
        assert got.dtype == dtype
        difference = (got - expected).abs().max() / expected.abs().max()
        assert difference < tolerance, tile
    if length == 150 and sliding_window is None:
        # the packed part matters: the same attention over exact rows is something else
        exact = full(query, pair, rows, rotation, WINDOW, 0, fresh)
        assert (exact - expected).abs().max() > 1e-4


def test_large_scores_do_not_overflow(codec):
    store, pair, rows, rotation, normal = case(codec, WINDOW, 150, torch.float32)
    query = 1e3 * normal(BATCH, HEADS * SHARE, 1, DIM)

    def tables(first, count):
        return rotation[0][first : first + count], rotation[1][first : first + count]

    got = packed_attention(query, store.stored(), LayerView(SCALING, tables), tile=16)
    expected = full(query, pair, rows, rotation, WINDOW, store.packed)
    assert torch.isfinite(got).all()
    assert (got - expected).abs().max() < 1e-2 * expected.abs().max()


def test_no_more_than_a_tile_is_ever_in_float(codec, monkeypatch):
    """Every tensor that decode makes is counted; none grows with the history."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    Largest.numbers = max(Largest.numbers, x.numel())
            return out

    largest = {}
    for length in (200, 2000):
        store, _, _, _, normal = case(codec, WINDOW, length, torch.float32)
        query = normal(BATCH, HEADS * SHARE, 1, DIM)
        stream = store.streams[0]
        # the scales are fp16 and live; views of them are not copies
        stream.key_scales, stream.value_scales = stream.key_scales.clone(), stream.value_scales.clone()

        def tables(first, count):
            return torch.ones(count, DIM), torch.zeros(count, DIM)

        Largest.numbers = 0
        with Largest():
            packed_attention(query, store.stored(), LayerView(SCALING, tables), tile=64)
        largest[length] = Largest.numbers
    assert largest[200] <= BATCH * 64 * CHANNELS
    assert largest[2000] <= max(BATCH * 64 * CHANNELS, BATCH * 2 * 2000)
    assert largest[2000] < 2000 * CHANNELS * BATCH / 8


def test_the_decode_matrix_of_values_is_applied_once(codec, monkeypatch):
    store, _, _, rotation, normal = case(codec, WINDOW, 400, torch.float32)
    calls = []
    original = SiteCodec.values
    monkeypatch.setattr(SiteCodec, "values", lambda self, *a: calls.append(1) or original(self, *a))
    view = LayerView(SCALING, lambda i, n: (rotation[0][i : i + n], rotation[1][i : i + n]))
    packed_attention(normal(BATCH, HEADS * SHARE, 1, DIM), store.stored(), view, tile=16)
    assert len(calls) == 1
    assert module.TILE >= 64
