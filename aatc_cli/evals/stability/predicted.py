"""KL that a plan is predicted to have, by the loss gradients of any Stats."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.stats import Stats
from aatc_cli.core import SIDES
from aatc_cli.core.weights import fisher_weights


@torch.no_grad()
def predictions(plan: Plan, stats: Sequence[Stats]) -> list[float | None]:
    """Second-order KL of a plan in nats per position by the loss gradients of each Stats; None where it has none."""
    transform = plan.transform()
    sums: list[list[float]] = [[] for _ in stats]
    classes, shares = transform.tables(plan.recipe.choices).classes, np.array(plan.classes.shares)[:, None]
    for layer, widths in enumerate(plan.bits):
        held = [artifact.layer(layer) for artifact in stats]
        for side in SIDES:
            name = f"layers.{layer}.{side}"
            decode, variance = transform.artifact.tensor(f"{name}.decode"), transform.artifact.array(f"{name}.variance")
            rows = np.array(widths[side]).reshape(-1, variance.size)
            # a class of tokens counts by its share and by what noise in each of its channels costs
            parts = shares if classes is None else shares * classes[layer][side]
            noise = (parts * plan.recipe.choices.channel_curves(variance)[np.arange(variance.size), rows]).sum(0)
            for total, layer_stats in zip(sums, held, strict=True):
                weights = fisher_weights(decode, layer_stats.loss_metric(side)).numpy()
                total.append(0.5 * float(np.sum(noise * weights)))
    return [sum(total) if artifact.fisher_windows else None for total, artifact in zip(sums, stats, strict=True)]
