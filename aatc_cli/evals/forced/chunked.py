"""Teacher-forced evaluation of codecs over all layers: passes over chunks, between which whole tokens are coded.

In one pass a layer's query would need the later layers' vectors of tokens that left the window. They are known once
those tokens have gone through the model, so the text goes through in chunks of at most w - f + 1 tokens: what any query
of a chunk reads reconstructed was before the chunk. The result is what decoding token by token would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, check_rows, make_tile, tile_attention
from aatc_cli.models.adapter import AttentionSite, ExactLayer, attention_layers, rebias
from aatc_cli.models.attention import LayerInputs, attention_override, exact_attention, logits_at


@dataclass
class _Layer:
    """What one layer has seen: exact keys and values [1, H, T, D], rows for the codec [1, T, C], rotation, hats."""

    exact: dict[Side, Tensor]
    rows: dict[Side, Tensor]
    cos: Tensor
    sin: Tensor
    hats: dict[Side, Tensor]

    def extend(self, other: _Layer) -> None:
        """Put the tokens of a chunk behind those before."""
        for side in SIDES:
            self.exact[side] = torch.cat((self.exact[side], other.exact[side]), 2)
            self.rows[side] = torch.cat((self.rows[side], other.rows[side]), 1)
        self.cos, self.sin = torch.cat((self.cos, other.cos), 1), torch.cat((self.sin, other.sin), 1)


@torch.no_grad()
def chunked_logits(model: Any, sites: list[AttentionSite], method: Method, tokens: Tensor, first: int) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of a window [1, T] read through the compressed cache. -> [P, V].

    Raises `AatcError` for a model with sliding layers beside full ones.
    """
    return chunked_logits_at(model, sites, method, tokens, torch.arange(first, tokens.shape[1] - 1))[0]


@torch.no_grad()
def chunked_logits_at(
    model: Any,
    sites: list[AttentionSite],
    method: Method,
    tokens: Tensor,
    positions: Tensor,
    prompt: int = 0,
    seen: Sequence[LayerInputs] = (),
) -> Tensor:
    """Logits of rising ``positions`` [n] of windows [B, T] whose first ``prompt`` tokens are a prefill. -> [B, n, V].

    seen: what every layer was given of the prompt, where it has been through the model; then all positions are behind
    it. Raises as `chunked_logits` does.
    """
    if any(isinstance(layer, ExactLayer) for layer in attention_layers(model)):
        raise AatcError(
            f"{method.name} codes all layers together, and this model keeps some of them exact",
            "use a recipe that codes layer by layer",
        )
    layers: list[_Layer | None] = [None] * len(sites)
    length, step = int(tokens.shape[1]), method.window.recent - method.window.flush + 1
    parts = []
    for inputs in seen:
        _take(layers, inputs, method, 0)
    if prompt and not seen:

        def prefill(inputs: LayerInputs) -> Tensor:
            _take(layers, inputs, method, 0)
            return exact_attention(inputs.site, inputs.query, inputs.key, inputs.value, inputs.scaling)

        with attention_override(model, sites, prefill):
            parts.append(logits_at(model, tokens[:, :prompt], positions[positions < prompt].to(tokens.device)))
    for start in range(prompt, length, step):
        end = min(start + step, length)
        _pack(layers, sites, method, end)

        def attend(inputs: LayerInputs, start: int = start, end: int = end) -> Tensor:
            return _attend(layers, inputs, method, start, end)

        with attention_override(model, sites, attend):
            places = torch.arange(start, end, device=tokens.device)[None]
            logits: Tensor = model(input_ids=tokens[:, start:end], position_ids=places, use_cache=False).logits
        wanted = positions[(positions >= start) & (positions < end)] - start
        parts.append(logits[:, wanted.to(logits.device)])
    return torch.cat(parts, 1)


def _attend(layers: list[_Layer | None], inputs: LayerInputs, method: Method, start: int, end: int) -> Tensor:
    """Attention of one layer over the chunk ``start`` .. ``end`` - 1, which enters what the layer has seen."""
    found = _take(layers, inputs, method, start)
    tile = make_tile(method.window, start, end, inputs.sliding_window, inputs.query.device)
    exact, hats = ((part["k"], part["v"]) for part in (found.exact, found.hats))
    return tile_attention(tile, inputs, inputs.query, exact, hats)


def _take(layers: list[_Layer | None], inputs: LayerInputs, method: Method, start: int) -> _Layer:
    """What a layer has seen with the chunk that begins at ``start``."""
    check_rows(inputs.site.layer, inputs.k_raw, inputs.v_raw, start)
    seen, found = _seen(inputs, method), layers[inputs.site.layer]
    if found is None:
        layers[inputs.site.layer] = found = seen
    else:
        found.extend(seen)
    return found


def _seen(inputs: LayerInputs, method: Method) -> _Layer:
    exact: dict[Side, Tensor] = {"k": inputs.key, "v": inputs.value}
    rows: dict[Side, Tensor] = {"k": inputs.k_raw, "v": inputs.v_raw}
    if method.coordinates == "post-rope":
        rows = {side: part.transpose(1, 2).flatten(2) for side, part in exact.items()}
    # hats count from token 0; the sinks among them are never read
    sinks = {side: part[:, :, : method.window.sinks] for side, part in exact.items()}
    return _Layer(exact, rows, inputs.cos, inputs.sin, sinks)


def _pack(layers: list[_Layer | None], sites: list[AttentionSite], method: Method, end: int) -> None:
    """Code what the window rule packs before the last query of a chunk that ends at ``end``."""
    until = method.window.sinks + packed_tokens(end, method.window)
    found = [layer for layer in layers if layer is not None]
    if not found or found[0].hats["k"].shape[2] >= until or until == method.window.sinks:
        return
    for side in SIDES:
        done = int(found[0].hats[side].shape[2])
        fresh = torch.stack([layer.rows[side][:, done:until] for layer in found])
        codec = method.codecs[0][side]
        if isinstance(codec, LayersCodec):
            coded = codec.reconstruct_layers(fresh)
        else:
            pairs = zip(method.codecs, fresh, strict=True)
            coded = torch.stack([_alone(codecs[side], part) for codecs, part in pairs])
        for layer, site, part in zip(found, sites, coded, strict=True):
            hat = _by_head(layer, site, method, side, part, slice(done, until))
            layer.hats[side] = torch.cat((layer.hats[side], hat), 2)


def _alone(codec: Any, rows: Tensor) -> Tensor:
    coded: Tensor = codec.reconstruct(rows)
    return coded


def _by_head(layer: _Layer, site: AttentionSite, method: Method, side: Side, rows: Tensor, span: slice) -> Tensor:
    """Coded rows [1, n, C] of the tokens in ``span`` as attention reads them, [1, H, n, D]."""
    before = method.coordinates == "pre-rope"
    bias = site.k_bias if side == "k" else site.v_bias
    whole = rebias(rows, bias) if before else rows
    heads = torch.unflatten(whole, -1, (layer.exact[side].shape[1], -1)).transpose(1, 2)
    if side == "v" or not before:
        return heads
    return apply_rope(heads, layer.cos[:, span], layer.sin[:, span], site.rope)
