"""Where q, k, v, o and RoPE are in a model, and a refusal by name where this tool cannot compress its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from aatc_cli.config import Geometry
from aatc_cli.errors import UnsupportedModelError
from aatc_cli.profiles import explain

_REFUSED = {
    "kv_lora_rank": "multi-head latent attention (MLA) already caches a low-rank latent",
    "is_encoder_decoder": "it is an encoder-decoder model",
    "kv_channels_per_layer": "its layers differ in cache width",
}


@dataclass(frozen=True)
class AttentionSite:
    """One attention layer: its modules and where keys are read before RoPE (the projection, or the key norm)."""

    layer: int
    name: str
    module: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Linear
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    normed: bool
    sliding_window: int | None


def geometry_of(config: Any) -> Geometry:
    """Cache geometry from a transformers configuration; raises `UnsupportedModelError` naming what is missing."""
    text = config.get_text_config()
    for field, why in _REFUSED.items():
        if getattr(text, field, None):
            raise UnsupportedModelError(f"{config.model_type} is not supported: {why}", _supported())
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1 or not getattr(text, "num_hidden_layers", None):
        raise UnsupportedModelError(f"{config.model_type} has no standard attention heads", _supported())
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    try:
        return Geometry(
            layers=text.num_hidden_layers, heads=heads, kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=head_dim, hidden_size=text.hidden_size,
        )  # fmt: skip
    except ValidationError as error:
        problem = f"the configuration of {config.model_type} describes no attention: {explain(error)}"
        raise UnsupportedModelError(problem, "mend its config.json, or fetch it again") from error


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """The attention layers of ``model`` in order; raises `UnsupportedModelError` for one this tool cannot read."""
    config: Any = model.config
    geometry = geometry_of(config)
    found: dict[int, AttentionSite] = {}
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "o_proj") and hasattr(module, "k_proj"):
            found[index] = _site(index, name, module, geometry, sliding_window_of(config, index))
    if sorted(found) != list(range(geometry.layers)):
        kind = getattr(config, "model_type", type(model).__name__)
        raise UnsupportedModelError(
            f"{kind} is not supported: {len(found)} of {geometry.layers} layers have q_proj, k_proj, v_proj and o_proj",
            _supported(),
        )
    return [found[index] for index in range(geometry.layers)]


def sliding_window_of(config: Any, layer: int) -> int | None:
    """Tokens a layer can look back, or None for all of them, from the configuration."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return window if kinds[layer] == "sliding_attention" else None
    return window if getattr(text, "use_sliding_window", True) else None


def _site(index: int, name: str, module: Any, geometry: Geometry, window: int | None) -> AttentionSite:
    widths = {"q_proj": geometry.heads, "k_proj": geometry.kv_heads, "v_proj": geometry.kv_heads}
    for part, heads in widths.items():
        linear = getattr(module, part, None)
        if not isinstance(linear, nn.Linear) or linear.out_features != heads * geometry.head_dim:
            raise UnsupportedModelError(
                f"{name}.{part} does not give {heads} heads of {geometry.head_dim}", _supported()
            )
    q_norm, k_norm = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    for norm in (q_norm, k_norm):
        if norm is not None and _norm_width(norm) != geometry.head_dim:
            raise UnsupportedModelError(f"{name} normalises over all heads at once", _supported())
    normed = k_norm is not None
    return AttentionSite(
        layer=index, name=name, module=module, q=q_norm if q_norm is not None else module.q_proj,
        k=k_norm if k_norm is not None else module.k_proj, v=module.v_proj, o=module.o_proj,
        q_bias=None, k_bias=None if normed else module.k_proj.bias, v_bias=module.v_proj.bias,
        normed=normed, sliding_window=window,
    )  # fmt: skip


def _norm_width(norm: Any) -> int:
    weight: Tensor | None = getattr(norm, "weight", None)
    return int(weight.numel()) if weight is not None else 0


def _supported() -> str:
    return "supported: decoder-only models with separate q, k, v, o projections (Llama, Mistral, Qwen2, Qwen3, SmolLM2)"


def flatten_heads(x: Tensor) -> Tensor:
    """A hooked projection [B, T, C] or key norm [B, T, H, D] as rows [B, T, C]."""
    return x if x.dim() == 3 else x.flatten(2)


def debias(x: Tensor, bias: Tensor | None) -> Tensor:
    """The part of a projection's output that depends on its input: K = XW + b gives XW."""
    return x if bias is None else x - bias


def rebias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Inverse of `debias`."""
    return x if bias is None else x + bias


def non_finite(x: Tensor) -> tuple[int, int] | None:
    """(sequence, position) of the first NaN or infinity in ``x`` [B, T, ...], or None."""
    if bool(torch.isfinite(x).all()):
        return None
    bad = (~torch.isfinite(x)).flatten(2).any(-1).nonzero()[0]
    return int(bad[0]), int(bad[1])
