"""The packed form: codecs of a plan on a model, as stores of codes in planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.artifacts.tensor_file import tensor_digest
from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import Codec, TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, geometry_of
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.runtime.packed.store import PackedStore
from aatc_cli.runtime.spec import CacheSpec, check_layers
from aatc_cli.runtime.store import Coordinates, Kind, Store

Codecs = Sequence[Mapping[Side, Codec]]


@dataclass(frozen=True)
class PackedForm:
    """Stores of codes in planes; ``layers`` are the codecs of keys and values of every compressed layer."""

    layers: tuple[tuple[SiteCodec, SiteCodec], ...]
    window: Window
    dtype: torch.dtype

    kind: Kind = "packed"
    coordinates: Coordinates = "pre-rope"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer; they grow with every block and never have room to spare."""
        if room is not None:
            raise AatcError("a packed cache has no spare room", "leave out the number of tokens it is for")
        return [PackedStore(*pair, self.window, batch, self.dtype) for pair in self.layers]

    def facts(self) -> list[Any]:
        """Transforms, scales, widths and quantizer of every codec."""
        return [codec_facts([site.codec for pair in self.layers for site in pair])]


def codec_facts(codecs: Sequence[TransformCodec]) -> list[Any]:
    """What decides the codes of these codecs, as JSON with digests."""
    found = []
    for codec in codecs:
        parts = (codec.encode, codec.decode, codec.scale, codec.bits, codec.variance, codec.weight)
        digests = [None if part is None else tensor_digest(part) for part in parts]
        centre = [] if codec.centre is None else [tensor_digest(codec.centre)]
        found.append([codec.quantizer, codec.scale_bits, *digests, *centre])
    return found


def packed_spec(model: nn.Module, layers: list[AttentionLayer], codecs: Codecs, window: Window) -> CacheSpec:
    """The packed caches of ``codecs`` on ``model``: in float32 (float64 for a float64 model), on its device.

    Raises `AatcError` for codecs that do not fit the model or have no packed form, or a window that is not exact.
    """
    if not window.exact:
        raise AatcError("the packed cache holds no window of 8 bits yet", "use a window of 16 bits")
    geometry, sites = geometry_of(model.config), check_layers(layers, len(codecs))
    parameter = next(model.parameters())
    placed = [
        {side: _placed(layer[side], site, geometry.channels, parameter) for side in SIDES}
        for site, layer in zip(sites, codecs, strict=True)
    ]
    pairs = tuple(
        (SiteCodec("k", pair["k"], site.k_bias, window.flush), SiteCodec("v", pair["v"], site.v_bias, window.flush))
        for site, pair in zip(sites, placed, strict=True)
    )
    bits: list[dict[Side, list[int]]] = [{side: pair[side].bits.tolist() for side in SIDES} for pair in placed]
    groups = HeadGroups(k=pairs[0][0].groups, v=pairs[0][1].groups)
    layout = CacheLayout.of_bits(geometry, window, groups, bits, placed[0]["k"].scale_bits)
    return CacheSpec.of(model, layers, PackedForm(pairs, window, parameter.dtype), window, layout)


def _placed(codec: Codec, site: AttentionSite, channels: int, like: Tensor) -> TransformCodec:
    if not isinstance(codec, TransformCodec):
        problem = f"a {type(codec).__name__} has no codes to pack"
        raise AatcError(problem, "use a plan whose recipe is packed, or a simulated cache")
    if codec.bits.numel() != channels:
        raise AatcError(
            f"layer {site.layer} has {channels} channels, its codec {codec.bits.numel()}", "use a plan of this model"
        )
    return codec.to(like.device, torch.promote_types(like.dtype, torch.float32))
