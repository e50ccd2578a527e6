"""Codecs that are chosen by the class of a token, and the table of a layer that its classes are found from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aatc_cli.core import SIDES
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.received import bin_costs
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.weights import shrunk


@dataclass(frozen=True)
class RatedCodec:
    """Codecs of one side of one layer, one for each class of tokens; thresholds [n - 1] float64 between classes."""

    codecs: tuple[TransformCodec, ...]
    thresholds: Tensor

    def classes(self, received: Tensor) -> Tensor:
        """The class of every token from what it received: int64, the shape of ``received``."""
        return torch.bucketize(received.to(self.thresholds.dtype), self.thresholds, right=True)

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> RatedCodec:
        """Move to a device, matrices and scales in ``dtype``."""
        return replace(
            self, codecs=tuple(codec.to(device, dtype) for codec in self.codecs), thresholds=self.thresholds.to(device)
        )


def received_table(stats: LayerStats, shrinkage: float) -> Tensor:
    """Tokens by what they received, and the shares of the loss metric that their keys and values hold: [3, BINS].

    The metric is shrunk by ``shrinkage``, as the transform's is. Estimates of single bins may be a little below zero.
    """
    rows = [stats.received]
    for side, sums in zip(SIDES, (stats.k_probes, stats.v_probes), strict=True):
        metric = shrunk(stats.loss_metric(side), shrinkage)
        rows.append(bin_costs(sums, metric) / (max(stats.readers, 1) * metric.shape[0]))
    return torch.stack(rows)
