"""The engine's own FlashAttention for prompts, where it has one for these numbers: it also gives the normalisers.

It reads keys of a group without a copy for every query head, and takes lengths as they come, where torch's fused
attention makes a plan for every new one.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def flash_attention(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor] | None:
    """Attention [n, Hq, D] of queries over keys and values [m, H, D], and its normalisers float32 [Hq, n].

    None where the engine has none for this device, type and head size.
    """
    if not _usable(query.dtype, query.shape[2], query.device):
        return None
    return _flash(query, keys, values, scaling, causal)


@cache
def _usable(dtype: torch.dtype, size: int, device: torch.device) -> bool:
    """Whether the engine's function takes such numbers: builds have not all types and sizes."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    few = torch.zeros(2, 1, size, dtype=dtype, device=device)
    try:
        _flash(few, few, few, 1.0, True)
    except (ImportError, AttributeError, RuntimeError, NotImplementedError, AssertionError, ValueError):
        return False
    return True


def _flash(query: Tensor, keys: Tensor, values: Tensor, scaling: float, causal: bool) -> tuple[Tensor, Tensor]:
    utils: Any = import_module("vllm.v1.attention.backends.fa_utils")
    count, total = query.shape[0], keys.shape[0]
    found: tuple[Tensor, Tensor] = utils.flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        max_seqlen_q=count,
        cu_seqlens_q=_ends(count, query.device),
        max_seqlen_k=total,
        cu_seqlens_k=_ends(total, query.device),
        softmax_scale=scaling,
        causal=causal,
        return_softmax_lse=True,
        # keys of one text are not shared out, so that sums have one order whatever else runs
        num_splits=1,
        fa_version=utils.get_flash_attn_version(head_size=query.shape[2]),
    )
    return found[0], found[1]


@lru_cache(maxsize=64)
def _ends(count: int, device: torch.device) -> Tensor:
    """Where one text of ``count`` tokens begins and ends: once for all layers, since a copy waits."""
    return torch.tensor([0, count], dtype=torch.int32).to(device, non_blocking=True)
