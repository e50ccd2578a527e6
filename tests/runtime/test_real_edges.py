"""Dead channels, limits, memory and time of the packed cache on a language model."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aatc_cli.config import Window
from aatc_cli.errors import AatcError
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.packed import attention
from aatc_cli.runtime.packed.site import SiteCodec

WINDOW = Window(sinks=4, recent=8, flush=4)


@pytest.mark.real
@pytest.mark.parametrize("bits", [2.5, 16])
@torch.no_grad()
def test_a_dead_value_head_and_a_dead_key_channel_stay_dead(real, calibrated, decoded, bits):
    """Nothing is divided by their zero variance, at no width, and what comes back of them is zero."""
    layers = real.model.model.layers
    dead = {"v": layers[4].self_attn.v_proj.weight, "k": layers[3].self_attn.k_proj.weight}
    kept = {side: weight.clone() for side, weight in dead.items()}
    try:
        dead["v"][64:128] = 0
        dead["k"][5] = 0
        codecs = calibrated(real.model, real.text[:, :80], 2.5)
        if bits == 16:
            codecs = [{s: c.with_bits(torch.full_like(c.bits, 16)) for s, c in pair.items()} for pair in codecs]
        ids = real.text[:, :31]
        with attach_codecs(real.model, codecs, WINDOW) as session:
            cache = session.new_cache()
            rows = [real.model(part, **{session.keyword: cache}).logits for part in torch.split(ids, 29, 1)]
        plain = real.model(ids, use_cache=False).logits
        assert all(torch.isfinite(row).all() for row in rows)
        assert (rows[0] - plain[:, :29]).abs().max() < 1e-9 * plain.abs().max()
        # two dead directions in hundreds that eighty tokens leave dead: what is alive is coded as ever
        assert 0 < (rows[1][:, -1] - plain[:, -1]).abs().max() < (0.3 if bits < 16 else 1e-3) * plain.abs().max()
        stores = cache.state.groups[0].stores
        keys, values = decoded(stores[3], 3)[0], decoded(stores[4], 3)[1]
        assert stores[3].packed == 20
        assert keys[..., 5].abs().max() < 1e-12 * keys.abs().max()
        assert values[..., 64:128].abs().max() < 1e-12 * values.abs().max()
        assert (keys[..., 6].abs().amax(), values[..., :64].abs().amax()) > (1e-2, 1e-2)
    finally:
        for side, weight in dead.items():
            weight.copy_(kept[side])


@torch.no_grad()
def test_a_constant_channel_comes_back_exactly(tiny_qwen2, codecs, decoded):
    """A channel that is its bias and nothing else is no business of the code: not a bit of it changes."""
    model = load_model(find_model(str(tiny_qwen2))).double()
    layer = model.model.layers[1].self_attn
    layer.k_proj.weight.zero_()
    layer.v_proj.weight.zero_()
    with attach_codecs(model, codecs(4, 32, 2, "mixed"), WINDOW) as session:
        cache = session.new_cache()
        ids = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(3))
        out = model(ids, **{session.keyword: cache}).logits
        step = model(ids[:, :1], **{session.keyword: cache}).logits
    assert torch.isfinite(out).all()
    keys, values = decoded(cache.state.groups[0].stores[1], 2)
    assert keys.shape == (2, 20, 32)
    assert torch.equal(keys, layer.k_proj.bias.expand_as(keys))
    assert torch.equal(values, layer.v_proj.bias.expand_as(values))
    assert torch.isfinite(step).all()


@torch.no_grad()
def test_a_large_bias_costs_nothing(tiny_qwen2, codecs, decoded):
    """Keys and values are off by what their projection without bias is coded with, however large the bias."""
    model = load_model(find_model(str(tiny_qwen2))).double()
    layer = model.model.layers[0].self_attn
    ids = torch.randint(0, 256, (1, 30), generator=torch.Generator().manual_seed(4))
    rows, errors = {}, []
    for name in "kv":
        linear = getattr(layer, f"{name}_proj")
        linear.register_forward_hook(lambda module, args, out, name=name: rows.update({name: out}))
    for _ in range(2):
        with attach_codecs(model, codecs(4, 32, 2, 3), WINDOW) as session:
            cache = session.new_cache()
            model(ids, **{session.keyword: cache})
        found = decoded(cache.state.groups[0].stores[0], 2)
        errors.append([x - rows[name][:, 4:24] for name, x in zip("kv", found, strict=True)])
        for name in "kv":
            getattr(layer, f"{name}_proj").bias.mul_(1000)
    for small, large in zip(*errors, strict=True):
        assert small.abs().max() > 1e-2
        torch.testing.assert_close(large, small, rtol=0, atol=1e-9)


class Largest(TorchDispatchMode):
    """The most numbers in any floating-point tensor made while it is on, views of given storages apart."""

    def __init__(self, known):
        super().__init__()
        self.known, self.numbers = known, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            floats = isinstance(x, torch.Tensor) and x.is_floating_point()
            if floats and x.untyped_storage().data_ptr() not in self.known:
                self.numbers = max(self.numbers, x.numel())
        return out


def filled(real, session, repeats):
    """A cache of 40 tokens of the model and their vectors again, ``repeats`` times: long, and made in no time."""
    cache = session.new_cache()
    real.model(real.text[:, :12], **{session.keyword: cache})
    state = cache.state
    for store in state.groups[0].stores:
        keys = torch.cat((store.exact.sink_keys, store.exact.ring_keys), 1).repeat(1, repeats, 1)
        values = torch.cat((store.exact.sink_values, store.exact.ring_values), 1).repeat(1, repeats, 1)
        store.append(keys, values)
    state.columns = state.groups[0].length = state.groups[0].stores[0].tokens
    return cache


@pytest.mark.real
@torch.no_grad()
def test_a_decode_step_never_holds_the_history_in_float(real, monkeypatch):
    """From 1200 tokens to 2400 the largest tensor of a step stays what it was, one tile of keys at most."""
    monkeypatch.setattr(attention, "TILE", 512)
    weights = {parameter.untyped_storage().data_ptr() for parameter in real.model.parameters()}
    found = {}
    with attach_codecs(real.model, real.low, WINDOW) as session:
        for repeats in (100, 200):
            cache = filled(real, session, repeats)
            assert cache.get_seq_length() == 12 * (repeats + 1)
            with Largest(weights) as largest:
                real.model(real.text[:, 50:51], **{session.keyword: cache})
            found[repeats] = largest.numbers
            assert cache.state.bytes_live() == cache.state.bytes_predicted()
    assert found[100] == found[200] <= 512 * 192


@pytest.mark.real
@torch.no_grad()
def test_packed_bytes_never_change_and_no_token_is_coded_twice(real, monkeypatch):
    """The work of packing is one block of tokens now and then, however long the cache has grown."""
    coded = []
    original = SiteCodec.encode
    monkeypatch.setattr(SiteCodec, "encode", lambda self, x: coded.append(x.shape[1]) or original(self, x))
    axes = {"keys": 1, "values": 1, "key_scales": 2, "value_scales": 2}
    with attach_codecs(real.model, real.low, WINDOW) as session:
        cache = filled(real, session, 20)
        earlier = None
        for step in range(9):
            coded.clear()
            real.model(real.text[:, step : step + 1], **{session.keyword: cache})
            streams = [store.streams[0] for store in cache.state.groups[0].stores]
            now = [{name: getattr(stream, name).clone() for name in axes} for stream in streams]
            if earlier is not None:
                for old, new in zip(earlier, now, strict=True):
                    assert all(torch.equal(new[n].narrow(a, 0, old[n].shape[a]), old[n]) for n, a in axes.items())
                fresh = now[0]["keys"].shape[1] - earlier[0]["keys"].shape[1]
                assert sum(coded) == 2 * 30 * fresh
                assert set(coded) <= {WINDOW.flush}
            earlier = now
    assert cache.state.groups[0].stores[0].packed > 240


@pytest.mark.real
@torch.no_grad()
def test_more_tokens_than_the_model_takes_are_refused_with_both_numbers(real):
    with attach_codecs(real.model, real.low, WINDOW) as session:
        cache = session.new_cache()
        with pytest.raises(AatcError, match="8193 tokens are more than the model's context of 8192"):
            real.model(real.text[:, :1].expand(1, 8193), **{session.keyword: cache})
        assert cache.get_seq_length() == 0
        cache = filled(real, session, 20)
        state = cache.state
        state.groups[0].offset = 8192 - state.groups[0].length
        place = torch.tensor([[8192]])
        with pytest.raises(AatcError, match="8193 tokens are more than the model's context of 8192"):
            real.model(real.text[:, :1], position_ids=place, **{session.keyword: cache})
