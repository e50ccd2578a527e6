"""Attach the compressed cache to a model: ``with compressed(model, codecs, window) as session``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.config import HeadGroups, Window
from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import Codec, TransformCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, ExactLayer, attention_layers, geometry_of
from aatc_cli.models.cache_hooks import CacheCall, hosted
from aatc_cli.models.compressed import CacheState, HostedCache, cache_keyword
from aatc_cli.models.layer_kinds import rope_switch
from aatc_cli.models.refusals import check_model
from aatc_cli.runtime.batch import CacheSpec
from aatc_cli.runtime.cache import CompressedState
from aatc_cli.runtime.site import SiteCodec


@dataclass(frozen=True)
class Session:
    """An attached model: makes empty caches for it; ``keyword`` names the argument that takes one."""

    spec: CacheSpec
    model: nn.Module
    keyword: str

    def new_cache(self) -> HostedCache:
        """An empty cache, to be given to ``generate`` or ``forward`` as ``keyword`` inside the block."""
        return HostedCache(CompressedState(self.spec), len(self.spec.windows))


@contextmanager
def compressed(model: nn.Module, codecs: Sequence[Mapping[Side, Codec]], window: Window) -> Iterator[Session]:
    """Attach the compressed cache to ``model`` while the block lasts.

    codecs: per compressed layer the codec of "k" and "v". Raises `AatcError` when they do not fit the model, or it is
    compiled or spread over devices, and `UnsupportedModelError` for a model whose attention cannot be read.
    """
    check_model(model)
    layers = attention_layers(model)
    spec = cache_spec(model, layers, codecs, window)
    with hosted(model, layers, _attend):
        yield Session(spec, model, cache_keyword(model))


def cache_spec(
    model: nn.Module, layers: list[AttentionLayer], codecs: Sequence[Mapping[Side, Codec]], window: Window
) -> CacheSpec:
    """What the caches of a model share: codecs on its device, in float32 (float64 for a float64 model)."""
    if not window.exact:
        raise AatcError("the packed cache holds no window of 8 bits yet", "use a window of 16 bits")
    config: Any = model.config
    geometry = geometry_of(config)
    sites = [layer for layer in layers if isinstance(layer, AttentionSite)]
    if len(codecs) != len(sites):
        raise AatcError(f"{len(codecs)} layers of codecs for a model of {len(sites)}", "use a plan of this model")
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
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    windows = tuple(layer.sliding_window if isinstance(layer, ExactLayer) else None for layer in layers)
    return CacheSpec(pairs, window, parameter.dtype, limit, layout, windows, rope_switch(config))


def _placed(codec: Codec, site: AttentionSite, channels: int, like: Tensor) -> TransformCodec:
    if not isinstance(codec, TransformCodec):
        problem = f"a {type(codec).__name__} has no codes to pack"
        raise AatcError(problem, "use a plan whose recipe is packed, or a simulated cache")
    if codec.bits.numel() != channels:
        raise AatcError(
            f"layer {site.layer} has {channels} channels, its codec {codec.bits.numel()}", "use a plan of this model"
        )
    return codec.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _attend(state: CacheState, call: CacheCall) -> Tensor:
    assert isinstance(state, CompressedState)
    return state.attend(call)
