"""SmolLM2 in float64 with plans of its own, and what its packed cache has to compute, written out in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.transform import group_moments, whitening
from aatc_cli.models.adapter import attention_sites, rebias
from aatc_cli.models.attention import attention_override
from aatc_cli.models.capture import capture
from aatc_cli.models.loading import find_model, load_model, load_tokenizer

CALIBRATION = 320
# head groups of keys and values: one for every kv head, and one for all
GROUPS = {"k": 3, "v": 1}


@dataclass(frozen=True)
class Real:
    """A language model in float64, its tokenizer, tokens [1, N] of a text, and codecs at 2.5 and at 16 bits."""

    model: Any
    tokenizer: Any
    text: Tensor
    low: list[dict[str, TransformCodec]]
    sixteen: list[dict[str, TransformCodec]]


@pytest.fixture(scope="session")
def real(real_model_path) -> Real:
    """float64 throughout: where anything is rounded to float32, a code near a tie may fall either way, which is a step.

    The model's own norms compute in float32 whatever its dtype, so they are replaced by the same norms in float64.
    """
    from aatc_cli.text.builtin import python_topics

    source = find_model(str(real_model_path))
    tokenizer = load_tokenizer(source)
    text = python_topics()["compound"] + python_topics()["specialnames"]
    ids = torch.tensor([tokenizer.encode(text)])
    model = load_model(source, dtype="float32").double()
    widen_norms(model)
    low = calibrate(model, ids[:, :CALIBRATION], 2.5)
    full = [{side: codec.with_bits(torch.full_like(codec.bits, 16)) for side, codec in pair.items()} for pair in low]
    return Real(model, tokenizer.raw, ids[:, CALIBRATION:], low, full)


def widen_norms(model) -> None:
    """Put torch's RMSNorm, which stays in the dtype it is given, in place of every norm of the model."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            parent, _, child = name.rpartition(".")
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=module.weight.dtype)
            norm.weight = module.weight
            setattr(model.get_submodule(parent), child, norm)


@torch.no_grad()
def calibrate(model, ids: Tensor, bits: float) -> list[dict[str, TransformCodec]]:
    """Codecs of the paper's transform from one short text, widths by reverse water-filling to a mean of ``bits``."""
    sites, rows = attention_sites(model), {}
    with capture(sites, lambda layer, q, k, v: rows.__setitem__(layer, {"k": k[0], "v": v[0]})):
        model(ids, use_cache=False)
    codecs = []
    for layer in range(len(sites)):
        pair = {}
        for side in SIDES:
            x = rows[layer][side].double()
            found = [whitening(moment) for moment in group_moments(x.T @ x / x.shape[0], GROUPS[side])]
            encode, decode = (torch.stack([getattr(one, name) for one in found]) for name in ("encode", "decode"))
            size = encode.shape[1]
            h = (x.unflatten(-1, (-1, size))[..., None, :] @ encode).flatten(-3)
            # the transform is scaled: what a latent's noise costs in the vector is its decode row's square
            cost = h.square().mean(0) * decode.square().sum(-1).flatten()
            # first-layer rows follow the token alone: this little text has fewer tokens than channels, and other text
            # is not silent where this one was
            scale = h.abs().quantile(0.95, 0)
            pair[side] = TransformCodec(
                encode, decode, scale.clamp_min(scale.median() / 10), waterfill(cost, bits), h.square().mean(0)
            )
        codecs.append(pair)
    return codecs


@pytest.fixture(scope="session")
def calibrated() -> Callable[..., list[dict[str, TransformCodec]]]:
    return calibrate


def waterfill(cost: Tensor, bits: float) -> Tensor:
    """Whole widths 0 .. 16 of log2 of the root of the cost over a level, which bisection sets by the mean width."""
    half = cost.clamp_min(1e-30).log2() / 2
    below, above = half.min() - 20, half.max() + 1
    for _ in range(60):
        level = (below + above) / 2
        widths = (half - level).round().clamp(0, 16)
        below, above = (level, above) if widths.mean() > bits else (below, level)
    return widths.int()


ChunkedLogits = Callable[..., Tensor]


@pytest.fixture(scope="session")
def chunked_logits() -> ChunkedLogits:
    return logits_in_chunks


@torch.no_grad()
def logits_in_chunks(model, codecs, window: Window, sequences: list[Tensor], chunks: list[list[int]]) -> Tensor:
    """Logits [B, T, V] of sequences [T_b] that were fed to a cache in chunks of these lengths, from one forward pass.

    A chunk of several tokens reads what was packed before it came, and itself exactly; a single token is stored first.
    Sequences are filled up to T on the right, which no earlier token can see.
    """
    length = max(len(sequence) for sequence in sequences)
    ids = torch.stack([torch.nn.functional.pad(sequence, (0, length - len(sequence))) for sequence in sequences])
    packed = torch.zeros(len(sequences), length)
    for row, parts in enumerate(chunks):
        assert sum(parts) == len(sequences[row])
        start = done = 0
        for count in parts:
            now = start + 1 if count == 1 and start else start
            while now - window.sinks - done > window.recent:
                done += window.flush
            packed[row, start : start + count] = done
            start += count
    places = torch.arange(length)
    decoded = (places >= window.sinks) & (places < window.sinks + packed[..., None])
    later = places > places[:, None]

    def attend(inputs):
        heads, dim = inputs.key.shape[1], inputs.key.shape[3]
        share = inputs.query.shape[1] // heads
        hats = []
        for side, raw, bias in (("k", inputs.k_raw, inputs.site.k_bias), ("v", inputs.v_raw, inputs.site.v_bias)):
            rows = rebias(codecs[inputs.site.layer][side].reconstruct(raw), bias)
            hats.append(rows.unflatten(-1, (heads, dim)).transpose(1, 2))
        k, k_hat, v, v_hat = (
            x.repeat_interleave(share, 1) for x in (inputs.key, inputs.rotate(hats[0]), inputs.value, hats[1])
        )
        far = decoded[:, None]
        scores = torch.where(far, inputs.query @ k_hat.transpose(2, 3), inputs.query @ k.transpose(2, 3))
        weights = (scores * inputs.scaling).masked_fill(later, -torch.inf).softmax(-1)
        return (weights * far) @ v_hat + (weights * ~far) @ v

    with attention_override(model, attention_sites(model), attend):
        return model(input_ids=ids, use_cache=False).logits


@pytest.fixture(scope="session")
def decoded() -> Callable[[Any, int], tuple[Tensor, Tensor]]:
    """Of a layer's store all that is packed, decoded: keys before RoPE and values, [b, P, C] each."""

    def decode_store(store, heads: int) -> tuple[Tensor, Tensor]:
        stream = store.streams[0]
        keys_site, site = stream.key_site, stream.value_site
        keys = keys_site.keys(stream.keys, stream.key_scales, keys_site.dtype)
        latents = site.value_latents(stream.values)
        # every token under a weight of one on itself alone: the sum that attention forms, of one term
        share = heads // len(latents)
        weighted = [
            (stream.value_scales[:, group, :, None].to(part.dtype) * part)[:, None].expand(-1, share, -1, -1)
            for group, part in enumerate(latents)
        ]
        ones = torch.ones(keys.shape[0], heads, stream.tokens, 1, dtype=site.dtype)
        return keys, site.values(weighted, ones).transpose(1, 2).flatten(2)

    return decode_store


@pytest.fixture(scope="session")
def assert_rounded() -> Callable[[Tensor, Tensor], None]:
    """Equal up to the float32 that generate hands logits out in: at most one of its units where a tie falls apart."""

    def check(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected.float(), rtol=1.3e-7, atol=1e-9)

    return check


@pytest.fixture(scope="session")
def padded() -> Callable[[list[Tensor]], dict[str, Tensor]]:
    """Prompts [T_b] as a left-padded batch: input_ids and attention_mask [B, T]."""

    def pad(prompts: list[Tensor], token: int = 2) -> dict[str, Tensor]:
        width = max(len(prompt) for prompt in prompts)
        left = [torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=token) for prompt in prompts]
        masks = [torch.arange(width) >= width - len(prompt) for prompt in prompts]
        return {"input_ids": torch.stack(left), "attention_mask": torch.stack(masks).long()}

    return pad
