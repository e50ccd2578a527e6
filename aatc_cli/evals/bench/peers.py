"""Decode attention of FlashInfer and FlashAttention-3 on a bfloat16 cache in place, where they are installed.

Neither is a dependency. What they compute is checked like everything else before it has a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import Timing, copies_of, graph_seconds

# rounding of weights and output to bfloat16, relative root mean square
PEER_BOUND = 0.01
_PAGE = 16
_WORKSPACE = 128 << 20

# query [B, Hq, D], keys and values [B, H, N, D] -> [B, Hq, D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flash_attention_3(geometry: Geometry, batch: int, context: int, device: torch.device) -> Attention:
    """``flash_attn_with_kvcache`` of FlashAttention-3; raises `ImportError` without it."""
    module = import_module("flash_attn_interface")
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        out: Any = module.flash_attn_with_kvcache(
            query[:, None], keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=lengths
        )
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found[:, 0]

    return attend


def flash_infer(geometry: Geometry, batch: int, context: int, device: torch.device) -> Attention:
    """FlashInfer's batched decode on pages of 16 tokens; raises `ImportError` without it."""
    module = import_module("flashinfer")
    g, each = geometry, context // _PAGE
    if context % _PAGE:
        raise AatcError(f"{context} tokens are no whole pages of {_PAGE}", f"time a multiple of {_PAGE} tokens")
    first = each * torch.arange(batch + 1, dtype=torch.int32, device=device)
    pages = torch.arange(batch * each, dtype=torch.int32, device=device)
    last = torch.full((batch,), _PAGE, dtype=torch.int32, device=device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device),
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=first,
        paged_kv_indices_buffer=pages,
        paged_kv_last_page_len_buffer=last,
    )
    wrapper.plan(
        first.clone(),
        pages.clone(),
        last.clone(),
        g.heads,
        g.kv_heads,
        g.head_dim,
        _PAGE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        paged = tuple(side.transpose(1, 2).reshape(-1, _PAGE, g.kv_heads, g.head_dim) for side in (keys, values))
        found: Tensor = wrapper.run(query, paged)
        return found

    return attend


PEERS: dict[str, Callable[[Geometry, int, int, torch.device], Attention]] = {
    "flashattention-3": flash_attention_3,
    "flashinfer": flash_infer,
}


def peer_timings(
    geometry: Geometry,
    batch: int,
    context: int,
    repeats: int,
    device: torch.device,
    seconds: Callable[[Callable[[], int], int], list[float]] = graph_seconds,
) -> tuple[list[Timing], dict[str, str]]:
    """Times of the libraries that are installed and agree with attention in float64; why others that are there do not.

    A cache lies as [B, N, H, D] in memory, which both read in place.
    """
    found: list[Timing] = []
    left_out: dict[str, str] = {}
    for name, make in PEERS.items():
        try:
            attend = make(geometry, batch, context, device)
            timing, error = peer_timing(name, attend, geometry, batch, context, repeats, device, seconds)
            if timing is not None:
                found.append(timing)
            else:
                left_out[name] = f"its error is {error:.3g}, more than {PEER_BOUND:g}"
        except ImportError:
            continue
        except (AatcError, RuntimeError) as problem:
            left_out[name] = (str(problem).strip().splitlines() or [""])[0]
    return found, left_out


def peer_timing(
    name: str,
    attend: Attention,
    geometry: Geometry,
    batch: int,
    context: int,
    repeats: int,
    device: torch.device,
    seconds: Callable[[Callable[[], int], int], list[float]],
) -> tuple[Timing | None, float]:
    """Times of ``attend`` on random caches, none where it is not right, and its error."""
    size = batch * context * geometry.channels * 4
    query = torch.randn(batch, geometry.heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
    caches = [_cache(geometry, batch, context, device) for _ in range(copies_of(size))]
    error = _error(attend(query, *caches[0]), query, *caches[0])
    if not error <= PEER_BOUND:
        return None, error
    return Timing(name, seconds(partial(_over, attend, query, caches), repeats), size), error


def _over(attend: Attention, query: Tensor, caches: list[tuple[Tensor, Tensor]]) -> int:
    for keys, values in caches:
        attend(query, keys, values)
    return len(caches)


def _cache(geometry: Geometry, batch: int, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random keys and values [B, H, N, D], the heads of a token side by side in memory."""
    shape = (batch, context, geometry.kv_heads, geometry.head_dim)
    one, other = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2))
    return one, other


def _error(got: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> float:
    """Relative error of the last sequence to attention in float64."""
    one, other, third = (part[-1:].to(torch.float64) for part in (query.unsqueeze(2), keys, values))
    expected = F.scaled_dot_product_attention(one, other, third, enable_gqa=True)[:, :, 0]
    return float((got[-1:] - expected).square().mean().sqrt() / expected.square().mean().sqrt())
