"""Sequential equals parallel on a language model: the packed cache token by token against one teacher-forced pass."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.packing import unpack_keys, unpack_values
from aatc_cli.core.quantizer import steps
from aatc_cli.core.transform import whitening
from aatc_cli.evals.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.capture import capture
from aatc_cli.models.loading import find_model, load_model, load_tokenizer
from aatc_cli.runtime.session import compressed

pytestmark = pytest.mark.real

LENGTH = 200
WINDOW = Window(sinks=4, recent=32, flush=16)


@pytest.fixture(scope="module")
def text_and_model(real_model_path):
    import pydoc_data.topics

    source = find_model(str(real_model_path))
    text = pydoc_data.topics.topics["compound"] + pydoc_data.topics.topics["specialnames"]
    ids = load_tokenizer(source).encode(text)
    return torch.tensor([ids[: 4 * LENGTH]]), load_model(source, dtype="float32")


@torch.no_grad()
def whitened(model, ids):
    """Codecs of the paper's transform from a few hundred tokens, at widths 2 and 3 in turn, in float64."""
    sites, rows = attention_sites(model), {}
    with capture(sites, lambda layer, q, k, v: rows.__setitem__(layer, (k[0].double(), v[0].double()))):
        model(ids, use_cache=False)
    codecs = []
    for layer in range(len(sites)):
        pair = {}
        for side, x in zip(SIDES, rows[layer], strict=True):
            found = whitening(x.T @ x / x.shape[0])
            h = x @ found.encode
            size = h.shape[1]
            pair[side] = TransformCodec(
                found.encode[None], found.decode[None], h.abs().quantile(0.95, 0).clamp_min(1e-6),
                torch.tensor([3 if c < size // 2 else 2 for c in range(size)]), h.square().mean(0),
            )  # fmt: skip
        codecs.append(pair)
    return codecs


@torch.no_grad()
def both_ways(model, codecs, ids):
    """Logits [T - 1, V] token by token and in one pass, and the cache that the first of them left."""
    expected = method_logits(model, attention_sites(model), Method("t", codecs, WINDOW), ids, 0)
    with compressed(model, codecs, WINDOW) as session:
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(ids.shape[1])]
        assert cache.state.bytes_live() == cache.state.bytes_predicted()
    return torch.stack(rows)[:-1], expected, cache


def kl(expected, other):
    p, q = expected.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def test_in_float64_the_two_agree_to_rounding(text_and_model):
    ids, model = text_and_model
    model = model.double()
    try:
        codecs = whitened(model, ids)
        got, expected, _ = both_ways(model, codecs, ids[:, :LENGTH])
    finally:
        model.float()
    scale, worst = expected.abs().max(), (got - expected).abs().max()
    print(f"float64: maximum difference {worst:.3g} of logits up to {scale:.3g}")
    assert worst < 1e-9 * scale


def test_in_float32_codes_on_a_tie_are_all_the_difference(text_and_model):
    """In float32 a latent within rounding of a code's boundary may get either code, and layers above follow.

    Before anything is packed the two ways agree to float32 rounding. In the first layer, whose rows differ by rounding
    alone, few codes differ, by one, and every one of those lies on a tie. What that costs is far below compression.
    """
    ids, model = text_and_model
    codecs = [{side: codec.to("cpu", torch.float32) for side, codec in pair.items()} for pair in whitened(model, ids)]
    window = ids[:, :LENGTH]
    got, expected, cache = both_ways(model, codecs, window)
    plain = model(window, use_cache=False).logits[0, :-1].detach()
    first, scale = WINDOW.sinks + WINDOW.recent, expected.abs().max()
    before = (got - expected)[:first].abs().max()
    ties, costs = kl(expected[first:], got[first:]), kl(plain[first:], expected[first:])
    print(f"float32: difference {before:.3g} before packing; KL {ties:.3g} after it, of compression {costs:.3g}")
    # thirty layers of float32: a few hundred roundings of 6e-8 at the scale of the logits
    assert before < 5e-5 * scale
    assert ties < 0.05 * costs
    assert costs > 0.01

    rows = {}
    with capture(attention_sites(model)[:1], lambda layer, q, k, v: rows.update(k=k[0], v=v[0])), torch.no_grad():
        model(window, use_cache=False)
    stream = cache.state.groups[0].stores[0].streams[0]
    found = {
        "k": unpack_keys(stream.keys, stream.key_site.plan)[0],
        "v": unpack_values(stream.values, stream.value_site.plan).transpose(-1, -2).flatten(1, 2)[0],
    }
    for side, site in (("k", stream.key_site), ("v", stream.value_site)):
        codec, order = site.codec, site.plan.order
        h = codec.latents(rows[side][WINDOW.sinks : WINDOW.sinks + stream.tokens])
        codes, alpha = codec.quantize(h)
        apart = (codes[:, order] - found[side]).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
        ratio = (h / steps(alpha, codec.scale, codec.bits) + 0.5)[:, order]
        distance = (ratio - ratio.round()).abs()[apart > 0]
        assert (distance < 1e-4).all()
