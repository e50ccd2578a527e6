"""A fused cache of a geometry with random tables."""

from __future__ import annotations

import torch

from aatc_cli.config import Geometry, HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.tiles import BLOCK
from aatc_cli.evals.bench.synthetic import synthetic_encode, synthetic_tables
from aatc_cli.runtime.fused.form import FusedForm
from aatc_cli.runtime.fused.static import FusedLayer
from aatc_cli.runtime.kernels.launch import on_hopper
from aatc_cli.runtime.kernels.tables import fast_pairs
from aatc_cli.runtime.spec import CacheSpec


def synthetic_spec(
    geometry: Geometry, window: Window, bits: float, theta: float, device: torch.device, dtype: torch.dtype
) -> CacheSpec:
    """A fused cache's static part with random tables, a seed for every layer; ``theta``: base of the frequencies."""
    steps = torch.arange(0, geometry.head_dim, 2, device=device, dtype=torch.float64) / geometry.head_dim
    frequencies = theta**-steps
    layers = []
    for layer in range(geometry.layers):
        tables = synthetic_tables(geometry, bits, fast_pairs(frequencies), device, seed=layer, hopper=on_hopper(device))
        layers.append(FusedLayer({}, tables, synthetic_encode(tables, geometry, seed=layer)))
    form = FusedForm(
        tuple(layers),
        window,
        dtype,
        geometry.heads,
        geometry.kv_heads,
        geometry.head_dim,
        frequencies.to(torch.float32),
        geometry.head_dim**-0.5,
    )
    layout = CacheLayout.of_bits(geometry, window, HeadGroups.both(geometry.kv_heads), form_bits(form))
    windows = (None,) * geometry.layers
    return CacheSpec(form, window, dtype, device, geometry.channels, None, windows, None, layout)


def form_bits(form: FusedForm) -> list[dict[Side, list[int]]]:
    """Widths of every channel by layer and side, as the tiles hold them."""
    bits: list[dict[Side, list[int]]] = []
    for layer in form.layers:
        sides = zip(SIDES, (layer.tables.keys, layer.tables.values), strict=True)
        found: dict[Side, list[int]] = {}
        for side, heads in sides:
            widths = [[width for width in part.widths for _ in range(BLOCK)] for part in heads]
            found[side] = [width for head in widths for width in head + [0] * (form.dim - len(head))]
        bits.append(found)
    return bits
