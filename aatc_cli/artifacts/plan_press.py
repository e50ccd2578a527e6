"""The press of a plan, with what its classes cost where it chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES

if TYPE_CHECKING:
    from aatc_cli.core.press.state import Pressed


def press_of_plan(plan: Plan) -> Pressed | None:
    """The press at the plan's share; None where all tokens stay."""
    press = plan.recipe.choices.press
    return press.of_plan(plan.layout, lambda: class_losses(plan) if press.says_classes else None)


def class_losses(plan: Plan) -> Any:
    """Loss of a token of every class [L, H, n + 1] in nats, were it as important as its kv head's average token.

    By the transform's energies and the curve that the widths were bought at. The last class is eviction: its token
    leaves the softmax, so what its key held is not missed, and of its value all is.
    """
    choices, geometry = plan.recipe.choices, plan.geometry
    energies = choices.grouped_energies(plan.transform().energies(), plan.groups)
    curve, count = choices.filling.curve, plan.classes.count
    found = np.zeros((geometry.layers, geometry.kv_heads, count + 1))
    for k in range(count):
        for layer, widths in enumerate(plan.class_bits(k)):
            for side in SIDES:
                left = energies[side][layer] * curve[np.array(widths[side])].reshape(geometry.kv_heads, -1)
                found[layer, :, k] += left.sum(1)
    found[:, :, count] = np.array([values.sum(1) for values in energies["v"]])
    return found
