"""Sequential equals parallel on a language model: the packed cache token by token against one teacher-forced pass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.packing import unpack_keys, unpack_values
from aatc_cli.core.quantizer import steps
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.capture import capture
from aatc_cli.runtime.attach import attach_codecs

pytestmark = pytest.mark.real

LENGTHS = [
    pytest.param(Window(sinks=4, recent=8, flush=4), 40, id="40"),
    pytest.param(Window(), 1024, marks=pytest.mark.slow, id="1024"),
]


@torch.no_grad()
def both_ways(model, codecs, window, ids):
    """Logits [T - 1, V] token by token and in one pass, and the cache that the first of them left."""
    expected = method_logits(model, attention_sites(model), Method("t", codecs, window, "pre-rope"), ids, 0)
    with attach_codecs(model, codecs, window) as session:
        cache = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: cache}).logits[0, -1] for t in range(ids.shape[1])]
        assert cache.state.bytes_live() == cache.state.bytes_predicted()
    return torch.stack(rows)[:-1], expected, cache


def kl(expected, other):
    p, q = expected.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


@pytest.fixture
def narrow(real):
    """The model in float32 and codecs that agree; back to float64 afterwards, which changes no weight."""
    codecs = [{side: codec.to("cpu", torch.float32) for side, codec in pair.items()} for pair in real.low]
    yield real.model.float(), codecs
    real.model.double()


@pytest.mark.parametrize(("window", "length"), LENGTHS)
def test_in_float64_the_two_agree_to_rounding(real, window, length):
    got, expected, cache = both_ways(real.model, real.low, window, real.text[:, :length])
    scale, worst = expected.abs().max(), (got - expected).abs().max()
    print(f"float64, {length} tokens: maximum difference {worst:.3g} of logits up to {scale:.3g}")
    assert worst < 1e-9 * scale
    assert cache.state.groups[0].stores[0].packed >= length - window.sinks - window.recent


@dataclass(frozen=True)
class Recorded:
    """A codec that gives back what a packed store holds, whatever it is asked for: rows [P, C] behind the sinks."""

    rows: Tensor

    def reconstruct(self, x: Tensor) -> Tensor:
        return torch.cat((self.rows[None], x[:, len(self.rows) :]), 1)


@pytest.mark.parametrize(("window", "length"), LENGTHS)
def test_in_float32_codes_on_a_tie_are_all_the_difference(real, narrow, decoded, window, length):
    """In float32 a latent within rounding of a code's boundary may get either code, and layers above follow.

    Before anything is packed the two ways agree to float32 rounding. After it they do so too, as soon as the one pass
    reads the very codes of the packed cache instead of making its own. In the first layer, whose rows differ by
    rounding alone, few codes differ, by one, and every one of those lies on a tie. What that costs is far below
    compression.
    """
    model, codecs = narrow
    ids = real.text[:, :length]
    got, expected, cache = both_ways(model, codecs, window, ids)
    plain = model(ids, use_cache=False).logits[0, :-1].detach()
    first, scale = window.sinks + window.recent, expected.abs().max()
    before = (got - expected)[:first].abs().max()
    apart = (got - expected)[first:].abs().amax(-1)

    stores = cache.state.groups[0].stores
    held = [decoded(store, 3) for store in stores]
    recorded = [{side: Recorded(rows[0]) for side, rows in zip("kv", pair, strict=True)} for pair in held]
    given = method_logits(model, attention_sites(model), Method("recorded", recorded, window, "pre-rope"), ids, 0)
    alike = (got - given).abs().max()
    ties, costs = kl(expected[first:], got[first:]), kl(plain[first:], expected[first:])
    print(
        f"float32, {length} tokens: difference {before:.3g} before packing, {alike:.3g} with the same codes, with "
        f"its own median {apart.median():.3g}, maximum {apart.max():.3g}; KL {ties:.3g}, of compression {costs:.3g}"
    )
    # thirty layers of float32: a few hundred roundings of 6e-8 at the scale of the logits
    assert before < 5e-5 * scale
    assert alike < 5e-5 * scale
    assert ties < 0.05 * costs
    assert costs > 0.01

    rows = {}
    with capture(attention_sites(model)[:1], lambda layer, q, k, v: rows.update(k=k[0], v=v[0])), torch.no_grad():
        model(ids, use_cache=False)
    stream = stores[0].streams[0]
    found = {
        "k": unpack_keys(stream.keys, stream.key_site.plan)[0],
        "v": unpack_values(stream.values, stream.value_site.plan).transpose(-1, -2).flatten(1, 2)[0],
    }
    for side, site in (("k", stream.key_site), ("v", stream.value_site)):
        codec, order = site.codec, site.plan.order
        h = codec.latents(rows[side][window.sinks : window.sinks + stream.tokens])
        codes, alpha = codec.quantize(h)
        apart = (codes[:, order] - found[side]).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
        ratio = (h / steps(alpha, codec.scale, codec.bits) + 0.5)[:, order]
        distance = (ratio - ratio.round()).abs()[apart > 0]
        assert (distance < 1e-4).all()
