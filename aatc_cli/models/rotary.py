"""The frequencies a model rotates with, where they are the same at every length."""

from __future__ import annotations

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
