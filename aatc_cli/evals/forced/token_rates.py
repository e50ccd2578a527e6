"""Teacher-forced evaluation of token rates: every token coded at the rate of its class, which decoding would know.

The class of a token depends on what it received from queries that themselves read tokens packed before. So each layer
goes through its queries in the order of decoding, f at a time: between two flushes all queries read the same packed
tokens, and when a block leaves the window every query that counts for its tokens has been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.attend import attention_weights, weighted_values
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.rated import RatedCodec
from aatc_cli.core.received import received_attention, received_of
from aatc_cli.evals.forced.exact_rows import as_held
from aatc_cli.evals.forced.teacher_forced import Method, reconstruct
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.models.attention import AttentionFunction, LayerInputs, attention_override, behind_prompt, scored_logits

# told of every layer: the classes [B, P] of its packed tokens
OnClasses = Callable[[int, Tensor], None]


def rated_logits(
    model: torch.nn.Module,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    first: int,
    on_classes: OnClasses,
) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of a window [1, T] read through a cache with token rates. -> [P, V].

    Token rates go with packed quantizers, which see keys before RoPE; raises `ValueError` for other coordinates.
    """
    with attention_override(model, sites, rates_attention(method, on_classes)):
        return scored_logits(model, tokens, first)


def rates_attention(method: Method, on_classes: OnClasses | None, prompt: int = 0) -> AttentionFunction:
    """The attention of a method with token rates, behind a prefill of ``prompt`` tokens; raises as `rated_logits`."""
    if method.coordinates != "pre-rope":
        raise ValueError(f"{method.name}: token rates are of keys before RoPE")

    def attend(inputs: LayerInputs) -> Tensor:
        codecs: Mapping[Side, RatedCodec] = method.codecs[inputs.site.layer]  # type: ignore[assignment]
        out, classes = rated_attention(as_held(inputs, method.window), codecs, method.window, prompt)
        if on_classes is not None:
            on_classes(inputs.site.layer, classes)
        return out

    return behind_prompt(prompt, attend)


def rated_attention(
    inputs: LayerInputs, codecs: Mapping[Side, RatedCodec], window: Window, prompt: int = 0
) -> tuple[Tensor, Tensor]:
    """Attention of every query over exact sinks and window and packed tokens at their rates; classes of the latter.

    A class without bits on either side is not kept at all: no query sees its tokens. Queries of the ``prompt`` saw
    everything exactly, and only those behind it are given. -> [B, Hq, T - prompt, D], [B, P].
    """
    keys, values = inputs.key.clone(), inputs.value.clone()
    hats = [
        reconstruct(inputs, {"k": k, "v": v}, window.sinks, "pre-rope")
        for k, v in zip(codecs["k"].codecs, codecs["v"].codecs, strict=True)
    ]
    empty = torch.tensor(
        [not bool(k.bits.any() or v.bits.any()) for k, v in zip(codecs["k"].codecs, codecs["v"].codecs, strict=True)]
    )
    batch, length = keys.shape[0], keys.shape[2]
    places = torch.arange(length, device=keys.device)
    received = torch.zeros(batch, length, dtype=torch.promote_types(keys.dtype, torch.float32), device=keys.device)
    kept = torch.ones(batch, length, dtype=torch.bool, device=keys.device)
    empty = empty.to(keys.device)
    if prompt:
        seen = inputs.query[:, :, :prompt], inputs.key[:, :, :prompt]
        told = {"sliding": inputs.sliding_window, "sinks": inputs.site.sinks, "softcap": inputs.site.softcap}
        received[:, :prompt] = received_attention(*seen, inputs.scaling, window, **told)
    classes, parts, start, done = [], [], prompt, 0
    while start < length:
        leaving = slice(window.sinks + done, window.sinks + packed_tokens(start + 1, window))
        if leaving.stop > leaving.start:
            done = leaving.stop - window.sinks
            chosen = codecs["k"].classes(received[:, leaving])
            classes.append(chosen)
            kept[:, leaving] = ~empty[chosen]
            for k, hat in enumerate(hats):
                member = (chosen == k)[:, None, :, None]
                for held, coded in zip((keys, values), hat, strict=True):
                    held[:, :, leaving] = torch.where(member, coded[:, :, leaving], held[:, :, leaving])
        end = min(window.sinks + done + window.recent, length)
        lag = places[start:end, None] - places[:end]
        allowed = (lag >= 0) & kept[:, None, None, None, :end]
        if inputs.sliding_window is not None:
            allowed &= lag < inputs.sliding_window
        weights = attention_weights(
            inputs.query[:, :, start:end],
            keys[:, :, :end],
            allowed,
            inputs.scaling,
            sinks=inputs.site.sinks,
            softcap=inputs.site.softcap,
        )
        received[:, :end] += received_of(weights, lag, window)
        parts.append(weighted_values(weights, values[:, :, :end]).to(inputs.query.dtype))
        start = end
    found = torch.cat(classes, 1) if classes else torch.zeros(batch, 0, dtype=torch.int64, device=keys.device)
    return torch.cat(parts, 2), found
