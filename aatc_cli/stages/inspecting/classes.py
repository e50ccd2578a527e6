"""inspect: the token classes of a Plan, as data and as rows of a table."""

from __future__ import annotations

from typing import Any

from aatc_cli.artifacts.plan import Plan
from aatc_cli.core import SIDES

COLUMNS = ["class", "share", "cost of keys", "of values", "mean bits of keys", "of values", "thresholds by layer"]


def class_facts(plan: Plan) -> list[dict[str, Any]]:
    """Per class: share, relative costs, mean bits by side, thresholds below it by layer, and shares by layer.

    Quotas have no thresholds.
    """
    facts, thresholds = [], plan.classes.thresholds
    for k, recorded in enumerate(plan.class_facts):
        widths = plan.class_bits(k)
        means = {
            side: sum(sum(layer[side]) for layer in widths) / (len(widths) * len(widths[0][side])) for side in SIDES
        }
        facts.append(
            recorded.model_dump()
            | {
                "bits_keys": means["k"],
                "bits_values": means["v"],
                "thresholds": thresholds[:, k - 1].tolist() if k and thresholds.size else None,
                "shares": plan.classes.shares[:, k].tolist(),
            }
        )
    return facts


def class_rows(facts: list[dict[str, Any]]) -> list[list[str]]:
    """One row per class, least attended first; thresholds as the least and the largest of all layers."""
    rows = []
    for k, fact in enumerate(facts):
        below = fact["thresholds"]
        span = "" if below is None else f"{min(below):.2g} .. {max(below):.2g}"
        numbers = [f"{fact[name]:.3g}" for name in ("key_cost", "value_cost")]
        bits = [f"{fact[name]:.2f}" for name in ("bits_keys", "bits_values")]
        rows.append([str(k), f"{100 * fact['share']:.1f} %", *numbers, *bits, span])
    return rows
