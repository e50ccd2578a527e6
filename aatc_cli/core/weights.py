"""Per-channel quantities of a transform: attention-aware weights, latent variances, percentile scales."""

from __future__ import annotations

import torch
from torch import Tensor

# below this share of what a channel would have without cancellation, its variance is float32 rounding (2^-24 squared,
# with room for sums of many terms)
_ROUNDING = 2.0**-40


def quadratic_weights(decode: Tensor, forms: Tensor) -> Tensor:
    """w[c] = sum over the group's kv heads h of B[c, h] F[h] B[c, h]^T. decode [groups, E, E], forms [H, D, D] -> [C].

    With F[h] = sum over query heads of E[q q^T] this is the paper's w^(K)[c] = sum E[(B_c q)^2] (Remark on grouped
    query attention); with F[h] = sum over query heads of W_O W_O^T it is w^(V)[c] = ||(B^V W_O)_c||^2.
    """
    groups, size, _ = decode.shape
    heads, dim, _ = forms.shape
    rows = decode.to(torch.float64).reshape(groups, size, heads // groups, dim)
    form = forms.to(torch.float64).reshape(groups, heads // groups, dim, dim)
    seen = torch.einsum("gchd,ghde->gche", rows, form)
    return (seen * rows).sum((2, 3)).clamp_min(0).flatten()


def shrunk(metric: Tensor, share: float) -> Tensor:
    """The loss metric [C, C] with ``share`` of it replaced by its diagonal.

    Few windows, and gradients of which a few tokens hold most, leave directions that look free and are not, and a plan
    seeks out just those. The diagonal is estimated far better than what lies beside it (shrinkage, as of covariances).
    """
    return (1.0 - share) * metric + share * torch.diag(metric.diagonal())


def fisher_weights(decode: Tensor, fisher: Tensor) -> Tensor:
    """w[c] = B_c M B_c^T: the loss metric M [C, C] seen by noise in every latent channel. decode [groups, E, E] -> [C].

    The factor that the paper's weights approximate, measured: it holds attention weights, value residuals, query
    energy, W_O, rotation and everything the rest of the network does with the output.
    """
    groups, size, _ = decode.shape
    blocks = torch.stack([fisher[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)])
    rows = decode.to(torch.float64)
    return (rows @ blocks.to(torch.float64)).mul_(rows).sum(-1).clamp_min(0).flatten()


def latent_variance(encode: Tensor, moment: Tensor) -> Tensor:
    """Second moment of every latent channel: diag(A^T M A) per group. encode [groups, E, E], moment [C, C] -> [C].

    The moment about zero, as in the paper's H^T H: the quantizer is symmetric, so a channel's mean costs bits too.
    A channel in which the vectors cancel but for rounding has none: what is left differs between this and a float32
    cache by orders of magnitude, and as a scale it would make a token's scale meaningless.
    """
    groups, size, _ = encode.shape
    blocks = torch.stack([moment[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)])
    matrices = encode.to(torch.float64)
    blocks = blocks.to(torch.float64)
    found = (blocks @ matrices).mul_(matrices).sum(1).clamp_min(0)
    # the same sum if nothing cancelled
    reach = (blocks.diagonal(dim1=1, dim2=2)[:, None] @ matrices.square())[:, 0]
    return torch.where(found > _ROUNDING * reach, found, torch.zeros_like(found)).flatten()


def channel_scales(encode: Tensor, rows: Tensor, variance: Tensor, percentile: float = 99.0) -> Tensor:
    """s[c]: the ``percentile`` of |h_c| over sampled rows [R, C] (paper, "The right scaling"). -> [C], positive.

    A channel whose percentile is zero though it has variance takes its standard deviation, and a dead one, without
    variance, takes 1, so that no scale is ever zero or rounding alone.
    """
    groups, size, _ = encode.shape
    by_group = rows.to(torch.float64).T.reshape(groups, size, -1)
    magnitudes = (encode.to(torch.float64).mT @ by_group).abs_().flatten(0, 1)
    scales = _percentiles(magnitudes, percentile)
    scales = torch.where(scales > 0, scales, variance.sqrt())
    return torch.where(variance > 0, scales, torch.ones_like(scales))


def _percentiles(values: Tensor, percentile: float) -> Tensor:
    """`torch.quantile` of every row of ``values`` [C, R] -> [C], sorting only what lies beyond it.

    Linear interpolation between order statistics: of R values the percentile lies at place percentile (R - 1) / 100.
    """
    count = values.shape[1]
    place = percentile / 100.0 * (count - 1)
    below = int(place)
    # the two order statistics around it end the shorter list of extreme values
    high = 2 * below >= count - 1
    extremes = torch.topk(values, count - below if high else below + 2, dim=1, largest=high).values
    lower, upper = extremes[:, -1], extremes[:, max(-2, -extremes.shape[1])]
    return torch.lerp(lower, upper, place - below) if high else torch.lerp(upper, lower, place - below)
