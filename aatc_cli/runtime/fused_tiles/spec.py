"""The fused caches of a plan with classes on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.runtime.fused_tiles.form import FusedTilesForm
from aatc_cli.runtime.fused_tiles.layers import Biases, fused_layers
from aatc_cli.runtime.fused_tiles.limits import check_device, check_sites, rotation_of
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.shared import FusedTiles
from aatc_cli.runtime.spec import CacheSpec, check_layers


def fused_tiles_spec(
    model: nn.Module,
    layers: list[AttentionLayer],
    codecs: Sequence[Mapping[Side, TileCodec]],
    window: Window,
    layout: CacheLayout | None,
) -> CacheSpec:
    """The fused caches of tiles of ``codecs`` on ``model``, whose window is checked already.

    Raises `AatcError` naming what of a plan or a model records or the kernel do not hold.
    """
    geometry, sites = geometry_of(model.config), check_layers(layers, len(codecs))
    parameter = next(model.parameters())
    check_sites(sites, geometry.heads // geometry.kv_heads, geometry.head_dim, window)
    check_device(parameter.device)
    frequencies, order = rotation_of(model, geometry.head_dim, sites[0].rope)
    biases: list[Biases] = [{"k": site.k_bias, "v": site.v_bias} for site in sites]
    made = fused_layers([site.layer for site in sites], codecs, biases, order, parameter)
    form = FusedTilesForm(made, window, parameter.dtype, geometry.heads, geometry.head_dim, frequencies)
    return CacheSpec.of(model, layers, form, window, _layout(layout, made))


def _layout(layout: CacheLayout | None, layers: Sequence[FusedTiles]) -> CacheLayout | None:
    """The byte law of records in place of packed tiles: codes are the same, places and padding are not."""
    if not isinstance(layout, TileLayout):
        return layout
    held = [fused.layer.held for fused in layers]
    bytes_of = [
        tiles.bytes_by_cause(packed)
        for packed, tiles in zip(layout.tiles, held, strict=True)
        if isinstance(tiles, RecordTiles)
    ]
    return replace(layout, tiles=tuple(bytes_of))
