"""Packing of a prompt's tokens: time beside torch, and codes that differ from torch's by roundings alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aatc_cli.config import Geometry
from aatc_cli.core import SIDES
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.evals.bench.attention import Timing
from aatc_cli.evals.bench.findings import Findings
from aatc_cli.evals.bench.rows import Size, speed_rows
from aatc_cli.evals.bench.tile_plan import RULE, synthetic_codecs
from aatc_cli.evals.bench.undecided import undecided
from aatc_cli.evals.speed.result import SpeedCheck
from aatc_cli.runtime.fused_tiles.layers import fused_layers
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.tiles.layer import TileLayer

# tokens that are packed both ways before anything is timed
_CHECKED = 8192


def compare_packing(
    found: Findings, geometry: Geometry, bits: float, size: Size, repeats: int, device: torch.device
) -> None:
    """Rows of packing as many tokens as there are in all sequences; raises `AatcError` where codes are not torch's."""
    context, batch = size
    timings, apart = packing_timings(geometry, bits, context * batch, repeats, device)
    if not apart <= 1.0:
        raise AatcError(
            f"packed tokens have errors {apart:.3g} times as far from those of torch as roundings explain; "
            "no time is reported",
            "report this with the device and the versions of torch and CuPy",
        )
    found.checks.append(SpeedCheck(context=context, batch=batch, backend="packing", error=apart, bound=1.0))
    found.rows += speed_rows("packing", size, timings[:1], timings[1:])


def packing_timings(
    geometry: Geometry, bits: float, tokens: int, repeats: int, device: torch.device
) -> tuple[list[Timing], float]:
    """Times of packing ``tokens`` random tokens by torch and by the kernel, and their `undecided`, at most 1 if right.

    Bytes are those of the bfloat16 keys and values that are packed.
    """
    layers, held = packing_layers(geometry, bits, device)
    codecs, tokens = layers[0].codecs, max(tokens // TILE, 1) * TILE
    generator = torch.Generator(device).manual_seed(1)
    rows = {side: like_coded(codecs[side], tokens, geometry.kv_heads, generator) for side in SIDES}
    received = torch.rand(1, RULE.orders(geometry.kv_heads), tokens, device=device, generator=generator)
    few = {side: part[:, :_CHECKED] for side, part in rows.items()}
    one, other = (layer.encode(few, received[..., :_CHECKED], 0) for layer in layers)
    _, apart = undecided(held, few, one, other)
    found = []
    for name, layer in zip(("torch", "fused-tiles"), layers, strict=True):

        def call(layer: TileLayer = layer) -> object:
            return layer.encode(rows, received, 0)

        seconds = [_seconds(call) for _ in range(repeats + 1)][1:]
        found.append(Timing(name, seconds, sum(part.nbytes for part in rows.values())))
    return found, apart


def packing_layers(geometry: Geometry, bits: float, device: torch.device) -> tuple[list[TileLayer], RecordTiles]:
    """One layer of a synthetic plan twice: packed by torch, and by the kernel."""
    codecs = synthetic_codecs(geometry, bits, torch.device("cpu"))
    [fused] = fused_layers([0], [codecs], [{"k": None, "v": None}], None, torch.empty(0, device=device))
    made = fused.layer
    assert isinstance(made.held, RecordTiles)
    return [TileLayer(0, made.codecs, made.biases, RULE, geometry.kv_heads, made.held), made], made.held


def like_coded(codec: TileCodec, tokens: int, heads: int, generator: torch.Generator) -> Tensor:
    """Rows bfloat16 [1, tokens, C] whose latents have the energies of ``codec``, tokens of different sizes."""
    inner, device = codec.codec, generator.device
    size = 0.5 + torch.rand(1, tokens, 1, device=device, generator=generator)
    normal = torch.randn(1, tokens, inner.variance.numel(), device=device, generator=generator)
    by_head = torch.unflatten(normal * size * inner.variance.sqrt(), -1, (heads, -1))
    return torch.einsum("...ge,gef->...gf", by_head, inner.decode).flatten(-2).to(torch.bfloat16)


def _seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
