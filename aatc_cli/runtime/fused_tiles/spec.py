"""The fused caches of a plan with classes on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.brought import brought
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.runtime.fused_tiles.encode import EncodeTables, FusedTileLayer
from aatc_cli.runtime.fused_tiles.form import FusedTilesForm
from aatc_cli.runtime.fused_tiles.forms import TileRoom
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
    biases = [{"k": site.k_bias, "v": site.v_bias} for site in sites]
    made = fused_layers([site.layer for site in sites], codecs, biases, order, parameter)
    form = FusedTilesForm(made, window, parameter.dtype, geometry.heads, geometry.head_dim, frequencies)
    return CacheSpec.of(model, layers, form, window, _layout(layout, made))


def fused_layers(
    layers: Sequence[int],
    codecs: Sequence[Mapping[Side, TileCodec]],
    biases: Sequence[Mapping[Side, Tensor | None]],
    order: Tensor | None,
    like: Tensor,
) -> tuple[FusedTiles, ...]:
    """Layers of a model whose parameters are as ``like``: codecs on that device, and on a GPU tables of both kernels.

    One compiled kernel serves them all. Every kv head is a head group of its own. What there is to make is made on the
    host, where the codecs may be, and goes to the device in one copy.
    """
    dtype, device = torch.promote_types(like.dtype, torch.float32), like.device
    host: list[dict[Side, TileCodec]] = [{side: pair[side].to("cpu", dtype) for side in SIDES} for pair in codecs]
    records = [RecordTiles(pair, pair["k"].rule, pair["k"].codec.groups) for pair in host]
    decoding, encoding = [None] * len(host), [None] * len(host)
    if device.type == "cuda":
        room = TileRoom.of(records)
        here = brought((list(biases), order), "cpu")
        decoding = [
            TileTables.of(pair, held, bias, here[1], room)
            for pair, held, bias in zip(host, records, here[0], strict=True)
        ]
        if dtype == torch.float32:
            encoding = [EncodeTables.of(held) for held in records]
    placed, decoding, encoding = brought((host, decoding, encoding), device)
    made = []
    for layer, pair, bias, held, decode, encode in zip(
        layers, placed, biases, records, decoding, encoding, strict=True
    ):
        tables = None if encode is None else encode.scaled(device)
        coded = FusedTileLayer(layer, pair, bias, held.rule, held.heads, held.on(pair), tables=tables)
        made.append(FusedTiles(coded, decode, order))
    return tuple(made)


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
