"""The fused form of tiles: a plan with classes on a model, as stores that a Hopper kernel decodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.rope import RopeStyle
from aatc_cli.core.tile_bytes import TileBytes
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tile_layout import TileLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, geometry_of
from aatc_cli.models.rotary import rotary_frequencies
from aatc_cli.runtime.fused_tiles.records import RecordTiles
from aatc_cli.runtime.fused_tiles.shared import FusedTiles, FusedTilesShared, FusedTilesStatic
from aatc_cli.runtime.fused_tiles.store import FusedTileStore
from aatc_cli.runtime.fused_tiles.tables import TileTables
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper
from aatc_cli.runtime.packed.form import codec_facts
from aatc_cli.runtime.spec import CacheSpec, check_layers
from aatc_cli.runtime.store import Coordinates, Kind, Store
from aatc_cli.runtime.tiles.layer import TileLayer

_DIMS, _MOST_GROUP = (64, 80, 96, 128, 256), 16
_OTHER = "use --cache packed"


@dataclass(frozen=True)
class FusedTilesForm(FusedTilesStatic):
    """Stores of tiles in records, of one model and plan."""

    kind: Kind = "fused"
    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every layer, which share their counters; with ``room`` they never grow beyond it."""
        shared = FusedTilesShared(self, batch)
        return [FusedTileStore(shared, place, batch, room) for place in range(len(self.layers))]

    def facts(self) -> list[Any]:
        """The rule of the classes, and transforms, scales, widths and quantizer of every codec."""
        rule = self.layers[0].layer.rule
        codecs = [fused.layer.codecs[side] for fused in self.layers for side in SIDES]
        widths = [codec.bits.tolist() for codec in codecs]
        facts = codec_facts([codec.codec for codec in codecs])
        return ["fused", [*rule.quotas], rule.order, rule.ranked_by, widths, facts]


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
    _check(sites, geometry.heads // geometry.kv_heads, geometry.head_dim, window)
    on_gpu = parameter.device.type == "cuda"
    if on_gpu and not (fused_available() and on_hopper(parameter.device)):
        raise AatcError("fused tiles need a GPU of compute capability 9.0 and CuPy", _OTHER)
    frequencies = rotary_frequencies(model, geometry.head_dim, partial=True).to(parameter.device)
    order = pair_order(geometry.head_dim, 2 * frequencies.numel(), sites[0].rope)
    made = []
    for site, pair in zip(sites, codecs, strict=True):
        placed: dict[Side, TileCodec] = {
            side: pair[side].to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)) for side in SIDES
        }
        biases = {"k": site.k_bias, "v": site.v_bias}
        tiles = RecordTiles(placed, placed["k"].rule, geometry.kv_heads)
        layer = TileLayer(site.layer, placed, biases, tiles.rule, geometry.kv_heads, tiles)  # type: ignore[arg-type]
        tables = TileTables.of(placed, tiles, layer.biases, order) if on_gpu else None
        made.append(FusedTiles(layer, tables, None if order is None else order.to(parameter.device)))
    still = torch.zeros(geometry.head_dim // 2 - frequencies.numel(), dtype=frequencies.dtype, device=parameter.device)
    turning = torch.cat((frequencies, still))
    form = FusedTilesForm(tuple(made), window, parameter.dtype, geometry.heads, geometry.head_dim, turning)
    return CacheSpec.of(model, layers, form, window, _layout(layout, made))


def pair_order(dim: int, rotary: int, style: RopeStyle) -> Tensor | None:
    """Dimensions [D] of a head such that those that turn together lie half of it apart; None where they do.

    rotary: how many turn, the first of them; the others are pairs that do not.
    """
    whole = torch.arange(dim)
    turned, rest = whole[:rotary], whole[rotary:]
    halves = (turned[::2], turned[1::2]) if style == "interleaved" else turned.chunk(2)
    order = torch.cat([part for pair in zip(halves, rest.chunk(2), strict=True) for part in pair]) if dim > rotary else (
        torch.cat(halves)
    )
    return None if torch.equal(order, whole) else order


def _check(sites: Sequence[AttentionSite], group: int, dim: int, window: Window) -> None:
    """Raise `AatcError` naming what of a model the kernel does not have."""
    if dim not in _DIMS or group > _MOST_GROUP:
        raise AatcError(f"the kernel of tiles has no heads of {dim} with {group} queries each", _OTHER)
    if window.sinks > 64:
        raise AatcError(f"the kernel of tiles has at most 64 sinks, this window {window.sinks}", _OTHER)
    for site in sites:
        if site.sliding_window or site.sinks is not None or site.softcap is not None:
            raise AatcError(f"{site.name} has a sliding window, sinks or capped scores, which fused tiles have not", _OTHER)
        if site.rope == "none" or site.rope != sites[0].rope:
            raise AatcError(f"{site.name} does not rotate its keys as fused tiles do", _OTHER)


def _layout(layout: CacheLayout | None, layers: Sequence[FusedTiles]) -> CacheLayout | None:
    """The byte law of records in place of packed tiles: codes are the same, places and padding are not."""
    if not isinstance(layout, TileLayout):
        return layout
    found = []
    for packed, fused in zip(layout.tiles, layers, strict=True):
        held = fused.layer.held
        assert isinstance(held, RecordTiles)
        count = sum(
            quota // 16 * bool(record.nbytes)
            for row in held.records
            for record, quota in zip(row, held.rule.quotas, strict=True)
        )
        codes = packed.codes_keys + packed.codes_values
        padding = held.nbytes - codes - 48 * count
        found.append(TileBytes(packed.codes_keys, packed.codes_values, padding, 32.0 * count, 16.0 * count))
    return replace(layout, tiles=tuple(found))
