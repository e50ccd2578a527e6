"""The fused caches of a plan with classes on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.runtime.fused_tiles.encode import FusedTileLayer
from aatc_cli.runtime.fused_tiles.form import FusedTilesForm
from aatc_cli.runtime.fused_tiles.limits import check_device, check_sites, rotation_of
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.shared import FusedTiles
from aatc_cli.runtime.fused_tiles.tables import TileTables
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
    made = [
        fused_layer(site.layer, pair, {"k": site.k_bias, "v": site.v_bias}, order, parameter)
        for site, pair in zip(sites, codecs, strict=True)
    ]
    form = FusedTilesForm(with_tables(made), window, parameter.dtype, geometry.heads, geometry.head_dim, frequencies)
    return CacheSpec.of(model, layers, form, window, _layout(layout, made))


def fused_layer(
    layer: int,
    codecs: Mapping[Side, TileCodec],
    biases: Mapping[Side, Tensor | None],
    order: Tensor | None,
    like: Tensor,
) -> FusedTiles:
    """One layer of a model whose parameters are as ``like``: its codecs on that device and records, without tables.

    Every kv head is a head group of its own.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    placed: dict[Side, TileCodec] = {side: codecs[side].to(like.device, dtype) for side in SIDES}
    heads = placed["k"].codec.groups
    tiles = RecordTiles(placed, placed["k"].rule, heads)
    coded = FusedTileLayer(layer, placed, biases, tiles.rule, heads, tiles)
    return FusedTiles(coded, None, order)


def with_tables(layers: Sequence[FusedTiles]) -> tuple[FusedTiles, ...]:
    """The same with tables where they are on a GPU, such that one compiled kernel serves them all."""
    tiles = [_records(fused) for fused in layers]
    return tuple(
        replace(
            fused,
            tables=TileTables.of(fused.layer.codecs, held, fused.layer.biases, fused.order, tiles)
            if fused.layer.device.type == "cuda"
            else None,
        )
        for fused, held in zip(layers, tiles, strict=True)
    )


def _records(fused: FusedTiles) -> RecordTiles:
    held = fused.layer.held
    assert isinstance(held, RecordTiles)
    return held


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
