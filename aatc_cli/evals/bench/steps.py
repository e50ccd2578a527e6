"""Whole decode steps of a profile's geometry: over the fused cache, beside the uncompressed ones."""

from __future__ import annotations

import torch

from aatc_cli.evals.bench.findings import Findings
from aatc_cli.evals.bench.ours import FUSED_WINDOW, THETA
from aatc_cli.evals.bench.rows import Size, speed_rows
from aatc_cli.evals.bench.synthetic_spec import synthetic_spec
from aatc_cli.evals.bench.tile_steps import tile_spec, tile_steps
from aatc_cli.evals.bench.whole_model import fused_steps, largest_batch, uncompressed_steps
from aatc_cli.models.random import random_llama
from aatc_cli.profiles import ModelProfile


def compare_steps(
    found: Findings, profile: ModelProfile, bits: float, sizes: list[Size], repeats: int, device: str, *, tiles: bool
) -> None:
    """Decode steps of all sizes; the uncompressed ones first, while no table of the fused cache takes memory.

    Where an uncompressed batch does not fit, the largest that does is timed beside ours.
    """
    geometry, place, dtype = profile.geometry, torch.device(device), torch.bfloat16
    model = random_llama(geometry, profile.context, THETA, place, dtype)
    theirs = [uncompressed_steps(model, geometry, *size, repeats, place) for size in sizes]
    for (context, batch), (timings, _) in zip(sizes, theirs, strict=True):
        most = 0 if timings else largest_batch(model, geometry, context)
        if 0 < most < batch:
            fitting, memory = uncompressed_steps(model, geometry, context, most, repeats, place)
            found.rows += speed_rows("decode", (context, most), fitting[:1], fitting[1:])
            found.memory += memory
    if tiles:
        spec, steps = tile_spec(model, geometry, FUSED_WINDOW, bits), tile_steps
    else:
        spec, steps = synthetic_spec(geometry, FUSED_WINDOW, bits, THETA, place, dtype), fused_steps
    for size, (timings, memory) in zip(sizes, theirs, strict=True):
        ours, mine = steps(model, spec, geometry, *size, repeats)
        found.rows += speed_rows("decode", size, timings, [ours])
        found.memory += [*memory, mine]
