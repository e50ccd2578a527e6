"""The fused form: static tables of a plan's codecs, and stores of tiles that the kernels decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.layout import CacheLayout, packed_tokens
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, geometry_of
from aatc_cli.models.rotary import rotary_frequencies
from aatc_cli.runtime.fused.shared import FusedShared
from aatc_cli.runtime.fused.static import FusedLayer, FusedStatic
from aatc_cli.runtime.fused.store import FusedStore
from aatc_cli.runtime.kernels.encode import EncodeTables
from aatc_cli.runtime.kernels.launch import fused_available, on_hopper
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables, fast_pairs
from aatc_cli.runtime.packed.form import Codecs, codec_facts
from aatc_cli.runtime.spec import CacheSpec, check_layers
from aatc_cli.runtime.store import Coordinates, Kind, Store


@dataclass(frozen=True)
class FusedForm(FusedStatic):
    """Stores of tiles, of one model and plan."""

    kind: Kind = "fused"
    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every layer, which share their counters; with ``room`` they never grow beyond it."""
        tiles = max(packed_tokens(room, self.window) // TILE, 1) if room is not None else 1
        shared = FusedShared(self, batch, tiles)
        return [FusedStore(shared, place, room) for place in range(len(self.layers))]

    def facts(self) -> list[Any]:
        """Transforms, scales, widths and quantizer of every codec."""
        return ["fused", codec_facts([layer.codecs[side] for layer in self.layers for side in SIDES])]


def fused_spec(model: nn.Module, layers: list[AttentionLayer], codecs: Codecs, window: Window) -> CacheSpec:
    """The fused caches of ``codecs`` on ``model``: tables of every layer on its device.

    Raises `AatcError` for codecs, windows and models that tiles cannot hold, or when CuPy is missing on a GPU.
    """
    config: Any = model.config
    geometry, parameter = geometry_of(config), next(model.parameters())
    sites = check_layers(layers, len(codecs))
    check_form(layers, window, geometry.heads // geometry.kv_heads, geometry.head_dim)
    if parameter.device.type == "cuda" and not fused_available():
        raise AatcError("the fused kernels need CuPy", "pip install 'aatc[cuda]', or use the packed cache")
    frequencies = rotary_frequencies(model, geometry.head_dim).to(parameter.device)
    fast = fast_pairs(frequencies)
    made = []
    for layer in codecs:
        pair: dict[Side, TransformCodec] = {}
        for side in SIDES:
            codec = layer[side]
            if not isinstance(codec, TransformCodec) or codec.groups != geometry.kv_heads:
                raise AatcError(
                    "the fused kernels need a plan with every kv head on its own", "use recipe loss-aware-fused"
                )
            pair[side] = codec.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))
        keys, values = ([HeadSide.of(pair[side], head) for head in range(geometry.kv_heads)] for side in SIDES)
        tables = LayerTables.of(keys, values, geometry.head_dim, fast, on_hopper(parameter.device))
        made.append(FusedLayer(pair, tables, EncodeTables.of(pair, tables)))
    form = FusedForm(
        tuple(made),
        window,
        parameter.dtype,
        geometry.heads,
        geometry.kv_heads,
        geometry.head_dim,
        frequencies.to(torch.float32),
        float(getattr(sites[0].module, "scaling", geometry.head_dim**-0.5)),
    )
    bits = [{side: layer.codecs[side].bits.tolist() for side in SIDES} for layer in made]
    layout = CacheLayout.of_bits(geometry, window, HeadGroups.both(geometry.kv_heads), bits)
    return CacheSpec.of(model, layers, form, window, layout)


def check_form(layers: list[AttentionLayer], window: Window, group: int, dim: int) -> None:
    """Raise `AatcError` naming what of a window or a model the kernels do not have.

    group: query heads of a kv head; dim: of a head.
    """
    other = "use the packed cache without fused kernels"
    if not window.exact:
        raise AatcError("the fused cache holds no window of 8 bits", other)
    if window.flush != TILE or window.recent < TILE:
        raise AatcError(f"fused kernels pack {TILE} tokens at once, this window {window.flush}", other)
    if dim not in (64, 96, 128, 256) or group > 8:
        raise AatcError(f"the fused kernels have no heads of {dim} with {group} queries each", other)
    for layer in layers:
        if not isinstance(layer, AttentionSite):
            raise AatcError("the fused kernels have no layers that stay exact", "use the packed cache")
        if layer.k_bias is not None or layer.v_bias is not None or layer.rope != "half" or layer.sliding_window:
            raise AatcError(f"{layer.name} has a bias, a sliding window or another rotation than fused kernels", other)
        if layer.sinks is not None or layer.softcap is not None:
            raise AatcError(f"{layer.name} has sinks or capped scores, which fused kernels do not compute", other)
