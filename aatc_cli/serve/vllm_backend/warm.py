"""What the first request would wait for, made at the start: the packing kernel, kernels of prompts."""

from __future__ import annotations

import torch

from aatc_cli.runtime.fused_tiles.encode import FusedTileLayer
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.kernels.received_rows import received_of
from aatc_cli.serve.vllm_backend.flash import flash_attention
from aatc_cli.serve.vllm_backend.quick import plain_keys


def warm_up(form: FusedTilesStatic) -> None:
    """Compile what prompts of this type need; nothing on a CPU."""
    device = form.frequencies.device
    if device.type != "cuda":
        return
    layer = form.layers[0].layer
    for fused in form.layers:
        if isinstance(fused.layer, FusedTileLayer):
            fused.layer.prepare(form.dtype)
    heads, lags = layer.heads, layer.rule.lags(form.window.recent)
    query = torch.zeros(2, form.heads, form.dim, dtype=form.dtype, device=device)
    keys, sums = query[:, :heads], torch.zeros(form.heads, 2, dtype=torch.float32, device=device)
    flash_attention(query, keys, keys, 1.0, causal=True)
    received_of(query, keys, sums, 1.0, lags, 0)
    angles = torch.ones(2, form.dim, dtype=torch.float32, device=device)
    plain_keys(keys, (angles, angles))
