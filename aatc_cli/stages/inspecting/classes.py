"""inspect: the token classes of a Plan, as data and as rows of a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES

COLUMNS = [
    "class",
    "tokens of a tile",
    "share",
    "cost of keys",
    "of values",
    "bits of keys",
    "of values",
    "heads masked",
]


def class_facts(plan: Plan) -> list[dict[str, Any]]:
    """Per class: share and tokens of a tile, relative costs, mean bits by side, and the share of heads that drop it.

    masked: share of kv heads over all layers in which tokens of the class have no bit on either side, which no query of
    such a head sees; none where layers below tell what they hold.
    """
    facts, spent = [], np.array(plan.bits_of_width)
    known = plan.recipe.choices.prediction.reads_below(plan.recipe)
    for k, recorded in enumerate(plan.class_facts):
        widths = {side: np.array([layer[side] for layer in plan.class_bits(k)]) for side in SIDES}
        coded = [widths[side].reshape(len(widths[side]), plan.geometry.kv_heads, -1).any(2) for side in SIDES]
        facts.append(
            recorded.model_dump()
            | {
                "tokens": round(recorded.share * plan.recipe.window.flush),
                "bits_keys": float(spent[widths["k"]].mean()),
                "bits_values": float(spent[widths["v"]].mean()),
                "masked": 0.0 if known else float(1.0 - (coded[0] | coded[1]).mean()),
            }
        )
    return facts


def class_rows(facts: list[dict[str, Any]]) -> list[list[str]]:
    """One row per class, least attended first."""
    rows = []
    for k, fact in enumerate(facts):
        numbers = [f"{fact[name]:.3g}" for name in ("key_cost", "value_cost")]
        bits = [f"{fact[name]:.2f}" for name in ("bits_keys", "bits_values")]
        masked = f"{fact['masked']:.1%}"
        rows.append([str(k), str(fact["tokens"]), f"{fact['share']:.1%}", *numbers, *bits, masked])
    return rows
