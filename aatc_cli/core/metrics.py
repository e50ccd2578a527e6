"""Divergence and likelihood of next-token distributions, and standard errors over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nats from logits [..., vocabulary], computed in float64. -> [...], never negative.

    The result is float64 too. In float32 the rounding of the two log-sum-exps alone is worth 5e-7 nats, more than a
    nearly lossless cache costs.
    """
    log_p = torch.log_softmax(reference.to(torch.float64), dim=-1)
    log_q = torch.log_softmax(other.to(torch.float64), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0)


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) in nats. logits [T, vocabulary], targets [T] -> [T]."""
    return torch.nn.functional.cross_entropy(logits.to(torch.float32), targets, reduction="none")


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over windows and its standard error (sample deviation over sqrt n); None for a single window."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, None
    spread = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, math.sqrt(spread / count)
