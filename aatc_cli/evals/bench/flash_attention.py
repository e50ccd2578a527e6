"""Decode attention of FlashAttention-3 out of a shared library that is named: vLLM's build, without vLLM.

The library registers ``torch.ops._vllm_fa3_C.fwd``; it is loaded as it is and nothing else of its package is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import Timing, graph_seconds
from aatc_cli.evals.bench.peers import PEER_BOUND, Attention, peer_timing

BACKEND = "flashattention-3"
# arguments of its `fwd`, as of vLLM 0.23, with what is not asked for
_DEFAULTS: dict[str, Any] = {
    "k_new": None,
    "v_new": None,
    "q_v": None,
    "out": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "cu_seqlens_k_new": None,
    "seqused_q": None,
    "seqused_k": None,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "page_table": None,
    "kv_batch_idx": None,
    "leftpad_k": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "seqlens_rotary": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "softmax_scale": None,
    "is_causal": False,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "rotary_interleaved": True,
    "scheduler_metadata": None,
    "num_splits": 0,
    "pack_gqa": None,
    "sm_margin": 0,
    "s_aux": None,
    "cp_world_size": 1,
    "cp_rank": 0,
    "cp_tot_seqused_k": None,
}
_OTHER = "name _vllm_fa3_C.abi3.so of a vLLM for this torch, or leave out --flash-attention"


@lru_cache(maxsize=4)
def loaded(path: Path) -> Any:
    """The operator ``fwd`` of the library at ``path``; raises `AatcError` for one that is of no use here."""
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        found = torch.ops._vllm_fa3_C.fwd.default
    except (OSError, AttributeError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["nothing is said"])[0]
        raise AatcError(
            f"{path.name} is no FlashAttention-3 for torch {torch.__version__}: {reason}", _OTHER
        ) from error
    count, expected = len(found._schema.arguments), 3 + len(_DEFAULTS)
    if count != expected:
        raise AatcError(f"fwd of {path.name} takes {count} arguments, not the {expected} that are known", _OTHER)
    return found


def attention_of(forward: Callable[..., Any], lengths: Tensor) -> Attention:
    """Attention of one query a sequence by ``forward``, over caches [B, H, N, D] that lie as [B, N, H, D].

    lengths int32 [B]: tokens of each sequence that are there.
    """

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        given = _DEFAULTS | {"seqused_k": lengths, "softmax_scale": query.shape[-1] ** -0.5}
        out: Any = forward(query[:, None], keys.transpose(1, 2), values.transpose(1, 2), *given.values())
        found: Tensor = out[0]
        return found[:, 0]

    return attend


def library_timing(
    path: Path, geometry: Geometry, batch: int, context: int, repeats: int, device: torch.device
) -> Timing:
    """Times of the library's kernel; raises `AatcError` where it, the device or the geometry do not fit together."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise AatcError("FlashAttention-3 is for GPUs of compute capability 9.0", "leave out --flash-attention")
    attend = attention_of(loaded(path), torch.full((batch,), context, dtype=torch.int32, device=device))
    try:
        timing, error = peer_timing(BACKEND, attend, geometry, batch, context, repeats, device, graph_seconds)
    except RuntimeError as problem:
        reason = (str(problem).strip().splitlines() or [""])[0]
        raise AatcError(f"{path.name} does not compute heads of {geometry.head_dim}: {reason}", _OTHER) from problem
    if timing is None:
        raise AatcError(f"attention of {path.name} has an error of {error:.3g}, more than {PEER_BOUND:g}", _OTHER)
    return timing
