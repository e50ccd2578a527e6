"""The fused cache by its torch twin: against the packed cache, which stores the same codes in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import geometry_of
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.fused.reference import head_vectors, unpack_tiles
from aatc_cli.runtime.kernels.encode import tiles_of
from aatc_cli.runtime.kernels.tables import HeadSide

WINDOW = Window(sinks=4, recent=64, flush=64)
# the model makes cos and sin in float32, the twin in float64: so far apart are logits that read the same codes
ROUNDING = 1e-6
# blocks of 16 channels of the two heads, keys and values
WIDTHS = {"k": ((3, 2, 1, 0), (8, 1, 0, 0)), "v": ((2, 2, 0, 0), (5, 4, 1, 1))}
QUANTIZERS = ("uniform", "uniform-token-max")


def codec(side: str, quantizer: str, seed: int) -> TransformCodec:
    """Two heads of 64 channels in blocks of 16, shuffled within the head so that sorting them matters."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(64, generator=generator) for _ in range(2)]
    bits = torch.cat(
        [torch.tensor(widths).repeat_interleave(16)[order] for widths, order in zip(WIDTHS[side], orders, strict=True)]
    )
    encode = torch.randn(2, 64, 64, generator=generator, dtype=torch.float64) / 8
    scale = 0.5 + torch.rand(128, generator=generator, dtype=torch.float64)
    weight = 0.1 + torch.rand(128, generator=generator, dtype=torch.float64)
    return TransformCodec(encode, torch.linalg.inv(encode), 3 * scale, bits, scale.square(), quantizer, weight)


def codecs(quantizer: str, layers: int = 2) -> list[dict[str, TransformCodec]]:
    return [
        {side: codec(side, quantizer, 10 * layer + place) for place, side in enumerate(SIDES)}
        for layer in range(layers)
    ]


@pytest.fixture(scope="module")
def model(llama_of: Any) -> Any:
    return llama_of(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, max_position_embeddings=1024
    ).double()


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("prompt", [3, 68, 69, 133])
def test_twin_decodes_as_the_packed_cache(model: Any, token_logits: Any, quantizer: str, prompt: int) -> None:
    ids = torch.randint(97, (2, 140), generator=torch.Generator().manual_seed(prompt))
    plan = codecs(quantizer)
    with attach_codecs(model, plan, WINDOW) as session:
        expected = token_logits(model, session.new_cache(), session.keyword, ids, prompt)
    with attach_codecs(model, plan, WINDOW, "fused") as session:
        got = token_logits(model, session.new_cache(140), session.keyword, ids, prompt)
    assert float((got - expected).abs().max()) < ROUNDING


def test_twin_differs_once_tokens_are_packed(model: Any, token_logits: Any) -> None:
    """The comparison above sees quantization: with no bits at all the logits are others."""
    ids = torch.randint(97, (1, 142), generator=torch.Generator().manual_seed(1))
    plan = codecs("uniform")
    none = [{side: one.with_bits(torch.zeros_like(one.bits)) for side, one in pair.items()} for pair in plan]
    found = []
    for pair in (plan, none):
        with attach_codecs(model, pair, WINDOW, "fused") as session:
            found.append(token_logits(model, session.new_cache(142), session.keyword, ids, 140))
    assert float((found[0] - found[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_tiles_hold_what_the_codec_gives_back(model: Any, quantizer: str) -> None:
    pair = codecs(quantizer)[0]
    rows = {
        side: torch.randn(192, 128, generator=torch.Generator().manual_seed(7), dtype=torch.float64) for side in SIDES
    }
    with attach_codecs(model, codecs(quantizer), WINDOW, "fused") as session:
        tables = session.spec.form.layers[0].tables
    data = tiles_of(rows, pair, tables)
    for head in range(2):
        u_k, u_v, alpha_k, alpha_v = unpack_tiles(data, tables, head)
        for side, codes, alpha in (("k", u_k, alpha_k), ("v", u_v, alpha_v)):
            part = HeadSide.of(pair[side], head)
            expected = pair[side].reconstruct(rows[side])[:, 64 * head : 64 * (head + 1)]
            assert torch.allclose(head_vectors(codes, alpha, part), expected, rtol=1e-9, atol=1e-9)


def test_bytes_are_those_of_the_law(model: Any) -> None:
    plan = codecs("uniform")
    bits = [{side: pair[side].bits.tolist() for side in SIDES} for pair in plan]
    layout = CacheLayout.of_bits(geometry_of(model.config), WINDOW, HeadGroups(k=2, v=2), bits)
    with attach_codecs(model, plan, WINDOW, "fused") as session:
        cache = session.new_cache(4 + 64 + 5 * 64)
        with torch.no_grad():
            model(torch.zeros(3, 7, dtype=torch.int64), **{session.keyword: cache})
    exact = 2 * 2 * 3 * (4 + 64) * 128
    # exact tokens are in the model's float64 here, two bytes a number in the law
    assert cache.state.bytes_live() - exact * 8 == layout.bytes(4 + 64 + 5 * 64, 3) - exact * 2


def test_refusals(model: Any) -> None:
    plan = codecs("uniform")
    eye, ones = torch.eye(128)[None], torch.ones(128)
    shared = [{side: TransformCodec(eye, eye, ones, one.bits, ones) for side, one in pair.items()} for pair in plan]
    with pytest.raises(AatcError, match="every kv head on its own"), attach_codecs(model, shared, WINDOW, "fused"):
        pass
    ragged = [
        {side: one.with_bits(one.bits.roll(1) * (torch.arange(128) != 5)) for side, one in pair.items()}
        for pair in plan
    ]
    with pytest.raises(AatcError, match="blocks of 16"), attach_codecs(model, ragged, WINDOW, "fused"):
        pass
    small = Window(sinks=4, recent=64, flush=16)
    with pytest.raises(AatcError, match="pack 64 tokens"), attach_codecs(model, plan, small, "fused"):
        pass
    with attach_codecs(model, plan, WINDOW, "fused") as session:
        cache = session.new_cache(140)
        kwargs = {session.keyword: cache, "use_cache": True}
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 139, dtype=torch.int64), **kwargs)
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **kwargs)
            with pytest.raises(AatcError, match="capacity of 140"):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64), **kwargs)


def test_biases_are_refused_by_name() -> None:
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=97,
    )
    biased = Qwen2ForCausalLM(config).eval()
    with pytest.raises(AatcError, match="bias"), attach_codecs(biased, codecs("uniform"), WINDOW, "fused"):
        pass
