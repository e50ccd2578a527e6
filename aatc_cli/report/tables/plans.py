"""Tables of plans: widths, and bytes by cause."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from aatc_cli.core import SIDES
from aatc_cli.report.blocks import Table
from aatc_cli.report.data.run import PlanView
from aatc_cli.report.series.plans import CAUSES, causes
from aatc_cli.report.text import number, percent, size


def plan_table(plans: Sequence[PlanView]) -> Table:
    """Mean widths, the most and the least generous layer, and predicted distortion of every plan."""
    columns = (
        "plan",
        "bits",
        "packed bits",
        "K bits",
        "V bits",
        "bits by layer",
        "zero-bit channels",
        "predicted K",
        "predicted V",
    )
    rows = []
    for plan in plans:
        means = {side: plan.layer_means(side) for side in SIDES}
        layers = [(k + v) / 2 for k, v in zip(means["k"], means["v"], strict=True)]
        counts = plan.histogram()
        total = sum(sum(counts[side]) for side in SIDES)
        rows.append(
            [
                plan.name,
                number(plan.bits_mean),
                number(plan.layout.bits_packed),
                *(number(statistics.fmean(means[side])) for side in SIDES),
                f"{number(min(layers))} to {number(max(layers))}",
                percent(sum(counts[s][0] for s in SIDES) / total),
                *(number(plan.predicted[side]) for side in SIDES),
            ]
        )
    note = "Predicted: what is left of the recipe's energies; with loss gradients as weights, the KL in nats per token."
    return Table.plain("Widths of each plan", columns, rows, notes=(note,))


def bytes_table(plans: Sequence[PlanView], context: int) -> Table:
    """Live bytes of every plan at ``context`` tokens by cause, the ratio to float16, and the static bytes."""
    columns = ("plan", *CAUSES.values(), "total", "ratio", f"bits at {context} tokens", "static")
    rows = []
    for plan in plans:
        parts = causes(plan.layout, context)
        static = sum(plan.layout.static_breakdown().values())
        rows.append(
            [
                plan.name,
                *(size(parts[cause]) for cause in CAUSES),
                size(plan.layout.bytes(context)),
                f"{number(plan.layout.ratio(context))}x",
                number(plan.layout.bits_at(context)),
                size(static),
            ]
        )
    reference = size(plans[0].layout.reference_bytes(context))
    notes = (f"The float16 cache takes {reference}. Static bytes do not grow with tokens and are not in the ratio.",)
    return Table.plain(f"Cache of one sequence of {context} tokens", columns, rows, notes)
