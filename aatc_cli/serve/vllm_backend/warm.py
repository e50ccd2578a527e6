"""What the first request would wait for, made at the start: tables of the packing kernel, kernels of prompts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from aatc_cli.runtime.fused_tiles.encode import FusedTileLayer
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.kernels.received_rows import received_of
from aatc_cli.serve.vllm_backend.quick import plain_keys

# layers whose tables are made at once, at most
_THREADS = 16


def warm_up(form: FusedTilesStatic) -> None:
    """Make tables of all layers, several at a time, and compile what prompts of this type need; nothing on a CPU."""
    device = form.frequencies.device
    if device.type != "cuda":
        return
    layers = [fused.layer for fused in form.layers if isinstance(fused.layer, FusedTileLayer)]
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(FusedTileLayer.prepare, layers):
            pass
    heads, lags = layers[0].heads, layers[0].rule.lags(form.window.recent)
    query = torch.zeros(2, form.heads, form.dim, dtype=form.dtype, device=device)
    keys, sums = query[:, :heads], torch.zeros(form.heads, 2, dtype=torch.float32, device=device)
    received_of(query, keys, sums, 1.0, lags, 0)
    angles = torch.ones(2, form.dim, dtype=torch.float32, device=device)
    plain_keys(keys, (angles, angles))
