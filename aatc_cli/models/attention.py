"""Replace a model's attention function for the length of a block, and hand it the vectors from before RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from aatc_cli.core.attend import causal_mask, masked_attention
from aatc_cli.core.rope import apply_rope
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite, ExactLayer, attention_layers, debias

_NAME = "aatc"


@dataclass(frozen=True)
class LayerInputs:
    """What an attention function gets. query [B, Hq, T, D], key and value [B, H, T, D] are as the model made them.

    k_raw, v_raw [B, T, C]: before RoPE and without projection bias. cos, sin [B, T, R]: the rotation tables. seen: that
    many first tokens have been through the model, and nobody asks for their attention again; memo: what was computed
    of them once for all who read them.
    """

    site: AttentionSite
    query: Tensor
    key: Tensor
    value: Tensor
    k_raw: Tensor
    v_raw: Tensor
    cos: Tensor
    sin: Tensor
    scaling: float
    seen: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def sliding_window(self) -> int | None:
        """Tokens the layer can look back, or None for all of them."""
        return self.site.sliding_window

    def once(self, what: str, check: Callable[[], None]) -> None:
        """Run a check, but of tokens that were seen before for the first of their readers alone."""
        if what not in self.memo:
            check()
            if self.seen:
                self.memo[what] = True

    def rotate(self, keys: Tensor) -> Tensor:
        """Keys [B, H, T, D] from before RoPE, rotated as the model does."""
        return apply_rope(keys, self.cos, self.sin, self.site.rope)


AttentionFunction = Callable[[LayerInputs], Tensor]
# of a layer that is kept exact: the layer, query, key, value, scaling
ExactAttention = Callable[[ExactLayer, Tensor, Tensor, Tensor, float], Tensor]


@contextmanager
def attention_function(config: Any, name: str, attend: Callable[..., Any], mask: Any = None) -> Iterator[None]:
    """Register ``attend`` (and a mask function) with transformers as ``name``, selected while the block lasts."""
    previous = config._attn_implementation
    try:
        AttentionInterface.register(name, attend)
        if mask is not None:
            AttentionMaskInterface.register(name, mask)
        config._attn_implementation = name
        yield
    finally:
        config._attn_implementation = previous
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@contextmanager
def attention_override(
    model: nn.Module, sites: list[AttentionSite], function: AttentionFunction, of_exact: ExactAttention | None = None
) -> Iterator[None]:
    """Run ``function`` (-> [B, Hq, T, D]) in place of attention in every compressed layer while the block lasts.

    Layers that are kept exact attend causally over the whole window of text, so no padding may be in it, or as
    ``of_exact`` says. Works through the public attention interface and forward hooks; the model's configuration, hooks
    and the interface are as before when the block ends, whatever happened in it.
    """
    seen: dict[str, Any] = {}
    by_module = {id(site.module): site for site in sites}
    exact = {id(layer.module): layer for layer in attention_layers(model) if isinstance(layer, ExactLayer)}
    handles: list[Any] = []

    def keep(name: str, bias: Tensor | None) -> Callable[[Tensor], None]:
        def take(rows: Tensor) -> None:
            seen[name] = debias(rows, bias)

        return take

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is None:
            raise AatcError("this model does not pass rotary tables to its attention", "it is not supported yet")
        seen["cos"], seen["sin"] = tables

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if id(module) in exact:
            out = (of_exact or exact_attention)(exact[id(module)], query, key, value, scaling)
            return out.transpose(1, 2).contiguous(), None
        inputs = LayerInputs(
            site=by_module[id(module)],
            query=query,
            key=key,
            value=value,
            k_raw=seen["k"],
            v_raw=seen["v"],
            cos=seen["cos"],
            sin=seen["sin"],
            scaling=scaling,
        )
        return function(inputs).transpose(1, 2).contiguous(), None

    config: Any = model.config
    try:
        for site in sites:
            handles.append(site.k.watch(keep("k", site.k_bias)))
            handles.append(site.v.watch(keep("v", site.v_bias)))
            handles.append(site.module.register_forward_pre_hook(before, with_kwargs=True))
        with attention_function(config, _NAME, attend):
            yield
    finally:
        for handle in handles:
            handle.remove()


def exact_attention(
    layer: ExactLayer | AttentionSite, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Causal attention of T tokens to themselves, within the layer's sliding window. -> [B, Hq, T, D]."""
    length, window = query.shape[2], layer.sliding_window
    if layer.sinks is None and layer.softcap is None and (window is None or length <= window):
        if query.is_cuda and query.dtype == torch.float32:
            # the kernels that hold no [T, T] of float32 know nothing of shared heads
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        # without a mask to read, which costs as much as the products do
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    mask = causal_mask(length, window, query.device)
    return masked_attention(query, key, value, mask, scaling, sinks=layer.sinks, softcap=layer.softcap)


def attention_behind(
    layer: ExactLayer | AttentionSite, query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> Tensor:
    """Causal attention of the last n of T tokens to all of them, within the layer's window. -> [B, Hq, n, D]."""
    length, count = key.shape[2], query.shape[2]
    places = torch.arange(length, device=query.device)
    lag = places[length - count :, None] - places
    allowed = lag >= 0 if layer.sliding_window is None else (lag >= 0) & (lag < layer.sliding_window)
    return masked_attention(query, key, value, allowed, scaling, sinks=layer.sinks, softcap=layer.softcap)


def behind_prompt(prompt: int, function: AttentionFunction) -> AttentionFunction:
    """Attention whose first ``prompt`` queries see one another exactly, as in a prefill; ``function`` gives the rest.

    What it gives is of the queries from ``prompt`` on alone: [B, Hq, T - prompt, D], which is all that is wanted of a
    prompt that was seen before. Without a prompt, itself.
    """
    if not prompt:
        return function

    def whole(inputs: LayerInputs) -> Tensor:
        if inputs.seen:
            return function(inputs)
        query, key, value = (part[:, :, :prompt] for part in (inputs.query, inputs.key, inputs.value))
        return torch.cat((exact_attention(inputs.site, query, key, value, inputs.scaling), function(inputs)), 2)

    return whole


@torch.no_grad()
def scored_logits(model: Any, tokens: Tensor, first: int) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of one window [1, T], those with a next token. -> [T - 1 - first, V]."""
    return scored_batch(model, tokens, first)[0]


@torch.no_grad()
def scored_batch(model: Any, tokens: Tensor, first: int) -> Tensor:
    """The same of windows [B, T]. -> [B, T - 1 - first, V]."""
    keep = tokens.shape[1] - first
    logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
    return logits[:, :-1]


@torch.no_grad()
def logits_at(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits of ``positions`` [n] of windows [B, T], no others computed. -> [B, n, V]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=positions).logits
    return logits
