"""A plan of tiles and its model before any engine: what is refused by name, and codecs on the engine's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aatc_cli.artifacts.manifest import require_model
from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.loading import ModelSource, empty_model, identify, load_config, load_model, load_tokenizer
from aatc_cli.models.rotary import config_frequencies
from aatc_cli.runtime.fused_tiles.layers import fused_layers
from aatc_cli.runtime.fused_tiles.limits import check_device, check_sites, pair_order, require_even
from aatc_cli.runtime.fused_tiles.shared import FusedTilesStatic
from aatc_cli.runtime.stored.opening import biases_of

_SEE = "see docs/serving.md"


@dataclass(frozen=True)
class Prepared:
    """A plan and its model before any engine: codecs by layer, window, biases, and the model without memory."""

    name: str
    codecs: Sequence[Mapping[Side, TileCodec]]
    window: Window
    biases: Sequence[Mapping[Side, Tensor | None]]
    model: Any


def prepare_plan(plan: Plan, source: ModelSource) -> Prepared:
    """A plan of tiles for the model at ``source``; weights are read only if its projections have biases.

    Raises `AatcError` naming what of plan or model the backend does not serve, `ArtifactError` for another model.
    """
    config = load_config(source)
    require_model(identify(source, config, load_tokenizer(source)), plan.model, plan.name)
    check_plan(plan)
    model = empty_model(source, config)
    biases = biases_of(model)
    if any(bias is not None for layer in biases for bias in layer.values()):
        biases = biases_of(load_model(source, dtype="float32"))
    check_model(model, plan.recipe.window)
    codecs = plan.codecs("cpu")
    for pair in codecs:
        require_even(pair)
    return Prepared(plan.name, codecs, plan.recipe.window, biases, model)


def check_plan(plan: Plan) -> None:
    """Raise `AatcError` for a plan that is not of tiles as blocks of the engine hold them."""
    hint = "plan with --recipe loss-aware-tiles-even"
    if not plan.recipe.choices.classes.tiled:
        raise AatcError(f"{plan.name} is no plan of tiles, which are the blocks of the engine", hint)
    if not plan.recipe.window.exact or plan.recipe.window.flush != TILE:
        raise AatcError(f"the window of {plan.name} is not exact, or does not leave by {TILE} tokens", hint)
    if plan.groups.k != plan.geometry.kv_heads or plan.groups.v != plan.geometry.kv_heads:
        raise AatcError(f"{plan.name} codes several kv heads together", hint)


def check_model(model: Any, window: Window) -> None:
    """Raise `AatcError` for a model whose layers are not all full attention with whole heads turned by halves."""
    geometry, sites = geometry_of(model.config), attention_sites(model)
    if geometry.sliding_layers:
        raise AatcError(f"{geometry.sliding_layers} layers of the model have sliding windows", _SEE)
    check_sites(sites, geometry.heads // geometry.kv_heads, geometry.head_dim, window)
    frequencies = config_frequencies(model, geometry.head_dim)
    if pair_order(geometry.head_dim, 2 * frequencies.numel(), sites[0].rope) is not None:
        raise AatcError("the rotation of the model turns neighbouring numbers, or not whole heads", _SEE)


def static_of(prepared: Prepared, dtype: torch.dtype, device: torch.device) -> FusedTilesStatic:
    """Codecs, records and tables of all layers on the engine's device, for its dtype."""
    check_device(device)
    geometry = geometry_of(prepared.model.config)
    like = torch.empty(0, dtype=dtype, device=device)
    for pair in prepared.codecs:
        if pair["k"].rule.order != "head" or pair["k"].rule.ranked_by != "received":
            raise AatcError(f"{prepared.name} does not rank tokens head by head by what they receive", _SEE)
    layers = fused_layers(range(len(prepared.codecs)), prepared.codecs, prepared.biases, None, like)
    frequencies = config_frequencies(prepared.model, geometry.head_dim).to(device)
    return FusedTilesStatic(layers, prepared.window, dtype, geometry.heads, geometry.head_dim, frequencies)
