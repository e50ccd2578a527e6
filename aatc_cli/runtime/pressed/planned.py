"""Caches of plans that have no packed form: simulated, and pressed where some of the tokens do not stay."""

from __future__ import annotations

from torch import nn

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.plan_press import press_of_plan
from aatc_cli.models.adapter import AttentionLayer
from aatc_cli.models.quantized import library_codec
from aatc_cli.runtime.pressed.form import pressed_spec
from aatc_cli.runtime.simulated.form import simulated_spec
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import Kind
from aatc_cli.runtime.tiles.form import tiles_spec


def unpacked_spec(model: nn.Module, layers: list[AttentionLayer], plan: Plan, kind: Kind) -> CacheSpec:
    """The simulated caches of a plan on ``model``; raises `AatcError` for another ``kind`` of a pressed one."""
    codecs = plan.simulated_codecs(str(next(model.parameters()).device), library=library_codec)
    recipe = plan.recipe
    if recipe.choices.classes.tiled:
        spec = tiles_spec(model, layers, codecs, recipe.window, plan.layout, "simulated")
    else:
        spec = simulated_spec(model, layers, codecs, recipe.window, recipe.coordinates, plan.layout)
    pressed = press_of_plan(plan)
    return spec if pressed is None else pressed_spec(model, layers, spec, pressed, kind)
