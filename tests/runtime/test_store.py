"""The store holds exactly the bytes of the law at every length, and the same state however the tokens came."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core.layout import CacheLayout, packed_tokens
from aatc_cli.core.transform import decode
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore

CHANNELS, HEADS = 12, 4
GROUPS = HeadGroups(k=4, v=2)


def sites(codec, window, bits="mixed", seed=0, bias=False, **options):
    generator = torch.Generator().manual_seed(seed)
    biases = [torch.randn(CHANNELS, generator=generator, dtype=torch.float64) if bias else None for _ in range(2)]
    return [
        SiteCodec(side, codec(CHANNELS, GROUPS.of(side), bits, seed + i, **options), biases[i], window.flush)
        for i, side in enumerate(("k", "v"))
    ]


def rows(batch, tokens, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens, CHANNELS, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]


def law(pair, window):
    geometry = Geometry(layers=1, heads=HEADS, kv_heads=HEADS, head_dim=CHANNELS // HEADS, hidden_size=CHANNELS)
    bits = {site.side: site.codec.bits.tolist() for site in pair}
    return CacheLayout.of_bits(geometry, window, GROUPS, [bits])


def storage_bytes(store):
    """Bytes of the storages behind the live tensors, each storage once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in store.tensors().values() if t.numel()
    }
    return sum(storages.values())


def assert_same(one, other):
    assert one.tokens == other.tokens
    left, right = one.tensors(), other.tensors()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize(
    ("window", "batch", "length"),
    [
        pytest.param(Window(sinks=4, recent=24, flush=16), 2, 400, id="s4-w24-f16"),
        pytest.param(Window(sinks=0, recent=1, flush=1), 1, 200, id="s0-w1-f1"),
        pytest.param(Window(sinks=3, recent=7, flush=5), 3, 300, id="odd"),
        pytest.param(Window(sinks=50, recent=8, flush=8), 1, 120, id="many-sinks"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bytes_are_the_law_at_every_length(codec, window, batch, length, seed):
    pair = sites(codec, window, seed=seed)
    layout = law(pair, window)
    store = PackedStore(*pair, window, batch, torch.float16)
    keys, values = rows(batch, length, torch.float16)
    assert storage_bytes(store) == layout.bytes(0, batch) == 0
    for t in range(length):
        store.append(keys[:, t : t + 1], values[:, t : t + 1])
        expected = layout.bytes(t + 1, batch)
        assert sum(tensor.nbytes for tensor in store.tensors().values()) == expected, t
        assert storage_bytes(store) == expected, t
        assert store.packed == packed_tokens(t + 1, window)
    # every piece of the law occurred, or the equality says little
    assert all(count > 0 for count in layout.breakdown(length, batch).values() if window.sinks or count)
    held = {id(v) for part in (store, store.exact) for v in vars(part).values() if isinstance(v, torch.Tensor)}
    held |= {id(v) for stream in store.streams for v in vars(stream).values() if isinstance(v, torch.Tensor)}
    assert held == {id(tensor) for tensor in store.tensors().values()}


@settings(max_examples=60, deadline=None)
@given(
    recent=st.integers(1, 20),
    flush=st.integers(1, 20),
    sinks=st.integers(0, 6),
    seed=st.integers(0, 1000),
    parts=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
def test_state_does_not_depend_on_how_tokens_came(codec, recent, flush, sinks, seed, parts):
    window = Window(sinks=sinks, recent=recent, flush=min(flush, recent))
    pair = sites(codec, window, seed=seed, bias=True)
    keys, values = rows(2, sum(parts), seed=seed)
    one, many = (PackedStore(*pair, window, 2, torch.float64) for _ in range(2))
    start = 0
    for count in parts:
        many.append(keys[:, start : start + count], values[:, start : start + count])
        for t in range(start, start + count):
            one.append(keys[:, t : t + 1], values[:, t : t + 1])
        start += count
        assert_same(one, many)
    layout = law(pair, window)
    assert storage_bytes(many) == sum(
        count * (4 if cause in ("sinks", "window") else 1) for cause, count in layout.breakdown(start, 2).items()
    )


@pytest.mark.parametrize("quantizer", ["uniform-token-max", "lloyd", "uniform"])
@pytest.mark.parametrize("bias", [False, True])
def test_contents_are_the_codec_s_own(codec, quantizer, bias):
    """What comes out equals `TransformCodec.reconstruct` of what went in; the exact part comes out untouched."""
    window = Window(sinks=3, recent=8, flush=4)
    pair = sites(codec, window, bias=bias, quantizer=quantizer, seed=5)
    keys, values = rows(2, 61)
    store = PackedStore(*pair, window, 2, torch.float64)
    store.append(keys, values)
    count = store.packed
    assert count == 52
    span = slice(3, 3 + count)
    expected = []
    for site, x in zip(pair, (keys, values), strict=True):
        shift = 0 if site.bias is None else site.bias
        expected.append(site.codec.reconstruct(x[:, span] - shift) + shift)
    stream = store.streams[0]
    got = stream.key_site.keys(stream.keys, stream.key_scales, torch.float64)
    torch.testing.assert_close(got, expected[0], rtol=1e-12, atol=1e-12)
    # one token at a time: weights that pick it give its value
    latents = stream.value_site.value_latents(stream.values)
    for token in (0, 7, 51):
        alpha = stream.value_scales[:, :, token].double()
        weighted = [
            (alpha[:, g, None] * latents[g][:, token])[:, None, None].expand(2, HEADS // GROUPS.v, 1, -1)
            for g in range(GROUPS.v)
        ]
        value = stream.value_site.values(weighted, torch.ones(2, HEADS, 1, 1, dtype=torch.float64))
        torch.testing.assert_close(
            value.transpose(1, 2).flatten(2), expected[1][:, token : token + 1], rtol=1e-12, atol=1e-12
        )
    assert torch.equal(store.exact.sink_keys, keys[:, :3])
    recent_keys, recent_values, first = store.recent()
    assert first == 55
    assert torch.equal(recent_keys, keys[:, 55:])
    assert torch.equal(recent_values, values[:, 55:])
    # many widths of zero bits: what they drop is really dropped
    assert (got - keys[:, span]).abs().max() > 1e-3


def test_nothing_is_quantized_twice(codec, monkeypatch):
    window = Window(sinks=2, recent=16, flush=8)
    pair = sites(codec, window)
    seen = []
    original = SiteCodec.encode

    def watch(self, x):
        seen.append(x.clone())
        return original(self, x)

    monkeypatch.setattr(SiteCodec, "encode", watch)
    keys, values = rows(1, 90)
    store = PackedStore(*pair, window, 1, torch.float64)
    store.append(keys[:, :40], values[:, :40])
    for t in range(40, 90):
        store.append(keys[:, t : t + 1], values[:, t : t + 1])
    packed = slice(2, 2 + store.packed)
    assert torch.equal(torch.cat(seen[::2], 1), keys[:, packed])
    assert torch.equal(torch.cat(seen[1::2], 1), values[:, packed])


def test_packed_bytes_never_change_once_written(codec):
    window = Window(sinks=2, recent=16, flush=8)
    keys, values = rows(1, 90)
    store = PackedStore(*sites(codec, window), window, 1, torch.float64)
    earlier = {}
    for t in range(90):
        store.append(keys[:, t : t + 1], values[:, t : t + 1])
        stream = store.streams[0]
        for name, axis in {"keys": 1, "values": 1, "key_scales": 2, "value_scales": 2}.items():
            now = getattr(stream, name)
            if name in earlier:
                assert torch.equal(now.narrow(axis, 0, earlier[name].shape[axis]), earlier[name])
            earlier[name] = now.clone()


def test_select_is_a_store_of_those_sequences(codec):
    window = Window(sinks=2, recent=8, flush=4)
    pair = sites(codec, window)
    keys, values = rows(3, 40)
    store = PackedStore(*pair, window, 3, torch.float64)
    store.append(keys[:, :33], values[:, :33])
    picked = torch.tensor([2, 0, 0, 1])
    new = PackedStore(*pair, window, 4, torch.float64)
    new.load({name: tensor.index_select(0, picked) for name, tensor in store.tensors().items()}, store.tokens)
    for t in range(33, 40):
        new.append(keys[picked, t : t + 1], values[picked, t : t + 1])
    whole = PackedStore(*pair, window, 4, torch.float64)
    whole.append(keys[picked], values[picked])
    assert_same(new, whole)
    assert storage_bytes(new) == sum(t.nbytes for t in new.tensors().values())


def test_a_snapshot_is_not_touched_by_what_follows(codec):
    window = Window(sinks=2, recent=8, flush=4)
    pair = sites(codec, window)
    keys, values = rows(1, 60)
    store, reference = (PackedStore(*pair, window, 1, torch.float64) for _ in range(2))
    for each in (store, reference):
        each.append(keys[:, :37], values[:, :37])
    saved = store.snapshot()
    store.append(keys[:, 37:], values[:, 37:])
    assert_same(saved, reference)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 10, 11, 14, 37, 38])
def test_dropped_tokens_can_be_given_again(codec, length):
    """Every count of latest exact tokens: after they are dropped and appended again the state is as it was."""
    window = Window(sinks=2, recent=8, flush=4)
    pair = sites(codec, window)
    keys, values = rows(1, length)
    whole = PackedStore(*pair, window, 1, torch.float64)
    whole.append(keys, values)
    exact = length - (2 + whole.packed if whole.packed else 0)
    for count in range(1, exact + 1):
        store = PackedStore(*pair, window, 1, torch.float64)
        store.append(keys, values)
        store.drop(count)
        assert storage_bytes(store) == sum(t.nbytes for t in store.tensors().values())
        store.append(keys[:, length - count :], values[:, length - count :])
        if length - count - 2 >= window.recent or not whole.packed:
            assert_same(store, whole)
        assert store.packed == whole.packed
        for left, right in zip(store.recent()[:2], whole.recent()[:2], strict=True):
            assert torch.equal(left, right)


def test_a_matrix_in_the_wrong_order_would_be_seen(codec):
    """The sorted decode rows are needed: the plain decode of sorted codes is far off."""
    window = Window(sinks=0, recent=4, flush=4)
    site = sites(codec, window, bits=[3, 8, 1, 16, 5, 2, 3, 8, 1, 16, 5, 2])[0]
    x = rows(1, 8)[0]
    data, alpha = site.encode(x)
    codes, _ = site.codec.quantize(site.codec.latents(x))
    right = site.keys(data, alpha, torch.float64)
    wrong = decode(site.codec.dequantize(codes[..., site.plan.order], alpha.transpose(1, 2)), site.codec.decode)
    assert (right - site.codec.reconstruct(x)).abs().max() < 1e-12
    assert (wrong - right).abs().max() > 0.1
