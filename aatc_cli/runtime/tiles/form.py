"""The tile form: the codecs of a plan with tiles on a model, as stores of tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aatc_cli.config import Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.layout import CacheLayout
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.runtime.fused_tiles.spec import fused_tiles_spec
from aatc_cli.runtime.packed.form import codec_facts
from aatc_cli.runtime.spec import CacheSpec, check_layers
from aatc_cli.runtime.store import Coordinates, Kind, Store
from aatc_cli.runtime.tiles.layer import TileLayer
from aatc_cli.runtime.tiles.plain import PlainTiles
from aatc_cli.runtime.tiles.store import TileStore


@dataclass(frozen=True)
class TilesForm:
    """Stores of tiles; ``layers`` are the codecs of every compressed layer. Packed bytes, or simulated ones."""

    layers: tuple[TileLayer, ...]
    window: Window
    dtype: torch.dtype
    kind: Kind = "packed"

    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer; they grow by tiles and never have room to spare."""
        if room is not None:
            raise AatcError("a cache of tiles has no spare room", "leave out the number of tokens it is for")
        return [TileStore(layer, self.window, batch, self.dtype) for layer in self.layers]

    def facts(self) -> list[Any]:
        """The rule of the classes, and transforms, scales, widths and quantizer of every codec."""
        rule = self.layers[0].rule
        codecs = [layer.codecs[side] for layer in self.layers for side in SIDES]
        widths = [codec.bits.tolist() for codec in codecs]
        return [[*rule.quotas], rule.order, rule.ranked_by, widths, codec_facts([codec.codec for codec in codecs])]


def tiles_spec(
    model: nn.Module,
    layers: list[AttentionLayer],
    codecs: Sequence[Mapping[Side, TileCodec]],
    window: Window,
    layout: CacheLayout | None,
    kind: Kind = "packed",
) -> CacheSpec:
    """The caches of tiles of ``codecs`` on ``model``: in float32 (float64 for a float64 model), on its device.

    Raises `AatcError` for codecs that do not fit the model, a window that is not exact, or one that does not leave by
    whole tiles.
    """
    rule = codecs[0]["k"].rule
    if not window.exact:
        raise AatcError("tiles hold no window of 8 bits yet", "use a window of 16 bits")
    if window.flush != rule.tile:
        raise AatcError(
            f"tiles of {rule.tile} tokens cannot leave a window that is flushed {window.flush} at a time",
            f"give the recipe a window with flush = {rule.tile}",
        )
    geometry, sites = geometry_of(model.config), check_layers(layers, len(codecs))
    for site, pair in zip(sites, codecs, strict=True):
        _check(pair, site.layer, geometry.channels, geometry.kv_heads)
    if kind == "fused":
        return fused_tiles_spec(model, layers, codecs, window, layout)
    parameter = next(model.parameters())
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    made = []
    for site, pair in zip(sites, codecs, strict=True):
        placed: dict[Side, TileCodec] = {side: pair[side].to(parameter.device, dtype) for side in SIDES}
        held = PlainTiles(placed, rule, geometry.kv_heads) if kind == "simulated" else None
        biases = {"k": site.k_bias, "v": site.v_bias}
        made.append(TileLayer(site.layer, placed, biases, rule, geometry.kv_heads, held))  # type: ignore[arg-type]
    return CacheSpec.of(model, layers, TilesForm(tuple(made), window, parameter.dtype, kind), window, layout)


def _check(codecs: Mapping[Side, TileCodec], layer: int, channels: int, heads: int) -> None:
    for codec in codecs.values():
        rule = codec.rule
        if codec.bits.shape != (rule.classes, channels):
            problem = f"layer {layer} has {channels} channels and {rule.classes} classes, its codec {codec.bits.shape}"
            raise AatcError(problem, "use a plan of this model")
        if rule.order == "head" and codec.codec.groups != heads:
            raise AatcError(
                f"every head has an order of its own, and {codec.codec.groups} head groups are not {heads} heads",
                'plan with groups "per-head", or with one order for a layer',
            )
