"""The form that a cache takes: what "auto" stands for, and the caches of a plan or of bare codecs in that form."""

from __future__ import annotations

from typing import Any

from torch import nn

from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Window
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer
from aatc_cli.runtime.fused.spec import fused_spec
from aatc_cli.runtime.kernels.launch import fused_available
from aatc_cli.runtime.packed.form import packed_spec
from aatc_cli.runtime.pressed.planned import unpacked_spec
from aatc_cli.runtime.session import CacheChoice
from aatc_cli.runtime.simulated.form import simulated_spec
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import Coordinates, Kind
from aatc_cli.runtime.tiles.form import tiles_spec


def chosen(plan: Plan, device: str) -> Kind:
    """The cache that "auto" stands for, of a plan on a device."""
    if plan.recipe.choices.classes.tiled and not plan.recipe.pressed:
        return "packed"
    if not plan.recipe.packed or plan.classes.count > 1 or not plan.recipe.window.exact:
        return "simulated"
    alone = plan.groups.k == plan.groups.v == plan.geometry.kv_heads
    if device.startswith("cuda") and fused_available() and alone and plan.recipe.window.flush == TILE:
        return "fused"
    return "packed"


def plan_spec(model: nn.Module, layers: list[AttentionLayer], plan: Plan, cache: CacheChoice) -> CacheSpec:
    """The caches of a plan on ``model``; raises `AatcError` for a form that they cannot take."""
    device, window = str(next(model.parameters()).device), plan.recipe.window
    kind = cache if cache != "auto" else chosen(plan, device)
    if plan.recipe.choices.classes.tiled and not plan.recipe.pressed:
        # of fused ones tables are made on the host first
        codecs = plan.codecs("cpu" if kind == "fused" else device)
        return tiles_spec(model, layers, codecs, window, plan.layout, kind)
    if kind == "simulated" or plan.recipe.pressed:
        return unpacked_spec(model, layers, plan, kind)
    return _stored_spec(model, layers, plan.codecs(device), window, kind, auto=cache == "auto")


def codecs_spec(
    model: nn.Module, layers: list[AttentionLayer], codecs: Any, window: Window, cache: Kind, coordinates: Coordinates
) -> CacheSpec:
    """The caches of bare codecs on ``model``; raises as `plan_spec` does."""
    if cache == "simulated":
        return simulated_spec(model, layers, codecs, window, coordinates)
    return _stored_spec(model, layers, codecs, window, cache)


def _stored_spec(
    model: nn.Module, layers: list[AttentionLayer], codecs: Any, window: Window, kind: Kind, *, auto: bool = False
) -> CacheSpec:
    """The packed or the fused caches of these codecs; with ``auto`` packed ones where tiles cannot hold them."""
    if kind == "packed":
        return packed_spec(model, layers, codecs, window)
    try:
        return fused_spec(model, layers, codecs, window)
    except AatcError:
        if not auto:
            raise
        return packed_spec(model, layers, codecs, window)
