"""Metric: the loss-aware KLT, in whose coordinates squared error is the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.transform import GroupTransform


class Metric(Transform):
    """Uncorrelated latents in which the loss metric is the identity."""

    name = "metric"
    meaning = "uncorrelated latents in which squared error is the loss"
    kinds = ("linear",)
    gradients = True

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """From second moments and loss metrics."""
        from aatc_cli.core.transform import loss_metric

        return loss_metric(moments, metrics)
