"""aatc eval speed with a profile and no model: the caches of a geometry, with random contents, on a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from aatc_cli.artifacts.versions import versions
from aatc_cli.console import progress, say
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.findings import Findings, compare_attention
from aatc_cli.evals.bench.ours import fused_attention, packed_attention, tile_attention
from aatc_cli.evals.bench.prompts import compare_prompts
from aatc_cli.evals.bench.ragged import compare_ragged
from aatc_cli.evals.bench.rates import device_rates
from aatc_cli.evals.bench.rows import Size, recorded
from aatc_cli.evals.bench.steps import compare_steps
from aatc_cli.evals.speed.result import Result as SpeedResult
from aatc_cli.evals.subjects import EvalOptions, device_name
from aatc_cli.profiles import ModelProfile
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper


@dataclass(frozen=True)
class Form:
    """What is timed: the fused cache, or with ``groups`` the packed one with as many head groups on each side.

    tiles: the fused cache of tiles with classes; whole: whole decode steps of a model too; library: FlashAttention-3
    that is timed beside the others; ragged, packing, prompts: tiles of sequences of different lengths, packing of
    equal ones, or all that a prompt takes, instead of decode attention.
    """

    whole: bool = False
    groups: int | None = None
    tiles: bool = False
    library: Path | None = None
    ragged: bool = False
    packing: bool = False
    prompts: bool = False

    @property
    def attention(self) -> bool:
        """Whether decode attention of equal sequences is timed."""
        return not (self.ragged or self.packing or self.prompts)


def measure_geometry(
    profile: ModelProfile, bits: float, sizes: list[Size], repeats: int, options: EvalOptions, form: Form
) -> SpeedResult:
    """Time one layer's decode attention, and where asked a model's decode step, at every (context, batch).

    The reference is the fastest attention on a bfloat16 cache in place. Raises `AatcError` without a GPU (or, for the
    fused caches, CuPy), or when the output is not the twin's.
    """
    groups, whole = form.groups, form.whole
    _check_device(options.device, form)
    device, geometry, began = torch.device(options.device), profile.geometry, time.perf_counter()
    found, rates = Findings(), device_rates(device) if groups is None and form.attention else None
    with progress("eval speed", len(sizes) + whole) as ticker:
        if form.prompts or form.packing:
            compare_prompts(found, profile, bits, sizes, repeats, device, prefill=form.prompts)
        for size in sizes if form.attention or form.ragged else []:
            if form.ragged:
                compare_ragged(found, geometry, bits, size, repeats, device, form.library)
                ticker.advance()
                continue
            if form.tiles:
                ours = tile_attention(geometry, bits, size, repeats, device)
            elif groups is None:
                ours = fused_attention(geometry, bits, size, repeats, device, rates)
            else:
                ours = packed_attention(geometry, groups, bits, size, repeats, device)
            compare_attention(found, ours, geometry, size, repeats, device, form.library)
            ticker.advance()
        if whole:
            compare_steps(found, profile, bits, sizes, repeats, options.device, tiles=form.tiles)
            ticker.advance()
    for place, reason in found.left_out.items():
        say(f"eval: {place} is left out: {reason}")
    return SpeedResult(
        recipe=synthetic_name(groups, form.tiles),
        budget=f"{bits:g}",
        model=profile.name,
        bits=bits,
        seconds=time.perf_counter() - began,
        device=device_name(options.device),
        dtype="bfloat16",
        versions=versions(),
        synthetic=True,
        absolute=True,
        threads=torch.get_num_threads(),
        repeats=repeats,
        steps=1,
        rows=found.rows,
        checks=found.checks,
        groups=groups,
        rates=recorded(rates),
        memory=found.memory,
        configurations=found.configurations,
        left_out=found.left_out,
    )


def synthetic_name(groups: int | None, tiles: bool) -> str:
    """The method of a result of a profile alone."""
    return "synthetic-tiles" if tiles else "synthetic" if groups is None else f"synthetic-groups-{groups}"


def _check_device(device: str, form: Form) -> None:
    """Raise `AatcError` where the cache of this form cannot be timed."""
    if not device.startswith("cuda"):
        raise AatcError("a geometry is timed on a CUDA device", "give --device cuda, or name a model")
    if form.groups is None and not fused_available():
        raise AatcError(
            "the fused kernels are timed on a CUDA device with CuPy", "pip install 'aatc[cuda]', or give --groups all"
        )
    if form.tiles and not on_hopper(torch.device(device)):
        raise AatcError("fused tiles are timed on a GPU of compute capability 9.0", "leave out --tiles")
