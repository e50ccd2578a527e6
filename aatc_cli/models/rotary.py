"""The frequencies a model rotates with, where they are the same at every length."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.errors import AatcError

# these choose their frequencies by the length of the sequence
_MOVING = ("dynamic", "longrope")


def rotary_frequencies(model: nn.Module, dim: int, *, partial: bool = False) -> Tensor:
    """Radians per token of every rotary pair, float64 [D / 2], or with ``partial`` of those that turn.

    Raises `AatcError` where not all of the head turns, where frequencies depend on the length, or cos and sin are
    scaled.
    """
    for name, module in model.named_modules():
        found: Any = getattr(module, "inv_freq", None)
        if not name.rsplit(".", 1)[-1].startswith("rotary_emb") or not isinstance(found, Tensor):
            continue
        kind, scale = getattr(module, "rope_type", "default"), float(getattr(module, "attention_scaling", 1.0))
        fits = found.numel() <= dim // 2 if partial else found.numel() == dim // 2
        if kind in _MOVING or not fits or scale != 1.0:
            break
        return found.detach().to(torch.float64)
    raise AatcError(
        "the fused kernels rotate whole heads by fixed frequencies, which this model does not",
        "use the packed cache without them",
    )


def config_frequencies(model: nn.Module, dim: int) -> Tensor:
    """As `rotary_frequencies`, of a model that may be without memory: by a module like its own, on a CPU."""
    text: Any = model.config
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1].startswith("rotary_emb"):
            kind: Any = type(module)
            holder = nn.Module()
            holder.rotary_emb = kind(config=text.get_text_config())
            return rotary_frequencies(holder, dim)
    return rotary_frequencies(nn.Module(), dim)


def rotation_tables(model: nn.Module) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """cos and sin [n, R] in float32 of positions [n], as the full layers of ``model`` are turned.

    Made by a module like the model's own, which may be without memory. Raises `AatcError` where frequencies depend on
    the length of the text.
    """
    config: Any = model.config
    text = config.get_text_config()
    found = [each for name, each in model.named_modules() if name.rsplit(".", 1)[-1].startswith("rotary_emb")]
    if not found:
        raise AatcError("this model has no rotary embedding of its own", "it is not supported yet")
    kind: Any = type(found[0])
    module = kind(config=text)
    kinds: Any = getattr(module, "rope_type", "default")
    if any(one in _MOVING for one in (kinds.values() if isinstance(kinds, dict) else [kinds])):
        raise AatcError(
            "this model turns its keys by frequencies that depend on the length of the text",
            "stored chunks need the same frequencies at every length",
        )
    names: dict[str, Any] = {}
    if "layer_type" in inspect.signature(module.forward).parameters:
        layers = getattr(text, "layer_types", None) or ["full_attention"]
        names["layer_type"] = "full_attention" if "full_attention" in layers else layers[0]

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = module.to(positions.device)(like, position_ids=positions[None], **names)
        return cos[0], sin[0]

    return tables
