"""Replace a model's attention function for the length of a block, and hand it the vectors from before RoPE."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionSite, debias, flatten_heads

_NAME = "aatc"


@dataclass(frozen=True)
class LayerInputs:
    """What an attention function gets. query [B, Hq, T, D], key and value [B, H, T, D] are as the model made them.

    k_raw, v_raw [B, T, C]: before RoPE and without projection bias. cos, sin [B, T, R]: the rotation tables.
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
    sliding_window: int | None


AttentionFunction = Callable[[LayerInputs], Tensor]


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
def attention_override(model: nn.Module, sites: list[AttentionSite], function: AttentionFunction) -> Iterator[None]:
    """Run ``function`` (-> [B, Hq, T, D]) in place of attention in every layer while the block lasts.

    Works through the public attention interface and forward hooks; the model's configuration, hooks and the
    interface are as before when the block ends, whatever happened in it.
    """
    seen: dict[str, Any] = {}
    by_module = {id(site.module): site for site in sites}
    handles: list[Any] = []

    def keep(name: str, bias: Tensor | None) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen[name] = debias(flatten_heads(output), bias)

        return hook

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is None:
            raise AatcError("this model does not pass rotary tables to its attention", "it is not supported yet")
        seen["cos"], seen["sin"] = tables

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        inputs = LayerInputs(
            site=by_module[id(module)], query=query, key=key, value=value, k_raw=seen["k"], v_raw=seen["v"],
            cos=seen["cos"], sin=seen["sin"], scaling=scaling, sliding_window=kwargs.get("sliding_window"),
        )  # fmt: skip
        return function(inputs).transpose(1, 2).contiguous(), None

    config: Any = model.config
    try:
        for site in sites:
            handles.append(site.k.register_forward_hook(keep("k", site.k_bias)))
            handles.append(site.v.register_forward_hook(keep("v", site.v_bias)))
            handles.append(site.module.register_forward_pre_hook(before, with_kwargs=True))
        with attention_function(config, _NAME, attend):
            yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def scored_logits(model: Any, tokens: Tensor, first: int) -> Tensor:
    """Logits of positions ``first`` .. T - 2 of one window [1, T], those with a next token. -> [T - 1 - first, V]."""
    keep = tokens.shape[1] - first
    logits: Tensor = model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits
    return logits[0, :-1]
