"""Our decode attention at one size: the fused cache, or the packed one with head groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aatc_cli.config import Geometry, Window
from aatc_cli.evals.bench.attention import CHECK_BOUND, FusedBench, Timing
from aatc_cli.evals.bench.packed import PACKED_BOUND, PackedBench
from aatc_cli.evals.bench.roofline import DeviceRates, Roofline, TileWork
from aatc_cli.evals.bench.rows import Size
from aatc_cli.evals.bench.tile_attention import TileBench

# rotary base of Llama 3.1: it decides how many pairs are reconstructed
THETA = 500_000.0
FUSED_WINDOW = Window(sinks=4, recent=128, flush=64)
_PACKED_WINDOW = Window()


@dataclass(frozen=True)
class Ours:
    """Times of our attention at one size, its error to the twin and what that may be, and what its work takes alone."""

    timing: Timing
    error: float
    bound: float
    roof: Roofline | None = None


def fused_attention(
    geometry: Geometry, bits: float, size: Size, repeats: int, device: torch.device, rates: DeviceRates | None
) -> Ours:
    """Over tiles of random codes, with what the bytes and the work of their kernel take alone."""
    context, batch = size
    bench = FusedBench.of(geometry, FUSED_WINDOW, bits, THETA, batch, context, device)
    timing, error = bench.measure(repeats)
    roof = None
    if rates is not None:
        roof = Roofline.of(TileWork.of(bench.tables), batch * bench.tiles, timing.bytes_moved, rates)
    return Ours(timing, error, CHECK_BOUND, roof)


def tile_attention(geometry: Geometry, bits: float, size: Size, repeats: int, device: torch.device) -> Ours:
    """Over records of tiles with three classes, of a synthetic plan whose tiles take ``bits`` a number."""
    context, batch = size
    bench = TileBench.of(geometry, FUSED_WINDOW, bits, THETA, [context] * batch, device)
    return Ours(*bench.measure(repeats), CHECK_BOUND)


def packed_attention(
    geometry: Geometry, groups: int, bits: float, size: Size, repeats: int, device: torch.device
) -> Ours:
    """Over the packed cache with this many head groups on each side."""
    context, batch = size
    bench = PackedBench.of(geometry, _PACKED_WINDOW, groups, bits, THETA, batch, context, device)
    return Ours(*bench.measure(repeats), PACKED_BOUND)
