"""A window of 8 bits: the rounding against its definition, and the evaluator against rounding by hand."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import CastCodec
from aatc_cli.core.plain import eight_bit
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import attention_override, scored_logits
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.runtime.attach import attach_codecs


def rounded_by_hand(row: list[float]) -> list[float]:
    scale = float(torch.tensor(max(map(abs, row)) / 127).half())
    return [max(-127, min(127, round(x / scale))) * scale if scale else 0.0 for x in row]


def sides_named(sides: str) -> list[str]:
    return [{"k": "key", "v": "value"}[side] for side in sides]


def test_eight_bits_by_hand():
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[3, 8:16] = 0
    found = eight_bit(x, 8)
    for row, got in zip(x, found, strict=True):
        wanted = [value for g in range(3) for value in rounded_by_hand(row[8 * g : 8 * g + 8].tolist())]
        assert got.tolist() == pytest.approx(wanted, abs=1e-12)
    assert (found - x).abs().max() <= x.abs().max() / 127 * 0.51
    assert bool(torch.isfinite(eight_bit(torch.full((1, 8), 1e30), 8)).all())


@pytest.mark.parametrize("sides", ["kv", "k", "v"])
@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen2"])
def test_every_token_is_read_in_eight_bits(name, sides, request):
    """Packed tokens that a float64 cache keeps whole: what is left is the rounding of all rows, with their bias."""
    model = load_model(find_model(str(request.getfixturevalue(name)))).double()
    sites = attention_sites(model)
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))

    def attend(inputs):
        site, (heads, dim) = inputs.site, inputs.key.shape[1::2]
        held = []
        for side, raw, bias in (("k", inputs.k_raw, site.k_bias), ("v", inputs.v_raw, site.v_bias)):
            rows = (raw[0] if bias is None else raw[0] + bias).reshape(-1, heads, dim)
            exact = [
                [rounded_by_hand(head.tolist()) for head in row] if side in sides else row.tolist() for row in rows
            ]
            held.append(torch.tensor(exact, dtype=torch.float64).transpose(0, 1)[None])
        keys = apply_rope(held[0], inputs.cos, inputs.sin)
        share = inputs.query.shape[1] // heads
        keys, values = (x.repeat_interleave(share, 1) for x in (keys, held[1]))
        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
        scores = (inputs.query @ keys.transpose(2, 3) * inputs.scaling).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ values

    with attention_override(model, sites, attend):
        expected = scored_logits(model, tokens, 0)
    codecs = [dict.fromkeys(SIDES, CastCodec(torch.float64))] * 4
    window = Window(sinks=2, recent=8, flush=4, **{f"{name}_bits": 8 for name in sides_named(sides)})
    got = method_logits(model, sites, Method("8", codecs, window, "pre-rope"), tokens, 0)
    assert (got - expected).abs().max() < 1e-10 * expected.abs().max()
    assert (got - scored_logits(model, tokens, 0)).abs().max() > 1e-4 * expected.abs().max()


def test_packed_cache_refuses(tiny_llama, codecs):
    model = load_model(find_model(str(tiny_llama)))
    with (
        pytest.raises(AatcError, match="holds no window of 8 bits yet"),
        attach_codecs(model, codecs(4, 32, 1, 4), Window(sinks=2, recent=8, flush=4, key_bits=8)),
    ):
        pass
