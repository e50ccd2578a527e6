"""Size of the statistics that collect holds and writes, from a geometry alone."""

from __future__ import annotations

from aatc_cli.config import Geometry
from aatc_cli.core.tile_sizes import RANKS

# rows that collect keeps per layer unless told otherwise
ROWS = 4096


def stats_bytes(geometry: Geometry, rows: int = ROWS, below: int = 0) -> int:
    """Bytes of the sums and of ``rows`` rows of all compressed layers, which every process of collect holds.

    Of a layer: four sums [C, C], two [H, D, D] and two [C] in float64, two [R, C] of rows in float32, and
    for two orders, both sides and groups of ranks in a tile one [H, D, D] in float64. With ``below`` layers below,
    a product [2 C, 2 C] in float64 with each of them and with itself.
    """
    channels = geometry.channels
    layer = 32 * channels**2 + 16 * geometry.kv_heads * geometry.head_dim**2 + 8 * rows * channels + 16 * channels
    layer += 32 * channels**2 * (below + 1 if below else 0)
    return geometry.layers * layer + ranked_bytes(geometry)


def ranked_bytes(geometry: Geometry) -> int:
    """What of `stats_bytes` is by the ranks of tokens in their tiles, which is gathered with gradients alone."""
    return geometry.layers * 32 * RANKS * geometry.kv_heads * geometry.head_dim**2
