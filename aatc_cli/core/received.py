"""The attention a token receives while it is exact: what chooses the rate it is stored at, and its calibration.

    r_i = sum over the queries t with first <= t - i <= last, and over all query heads, of a_ti^2

All those queries read token i exactly, so r_i is known when the token leaves the window and nothing later can change
it. On calibration text tokens are counted on a logarithmic grid of r, and what noise in them costs is measured from
their loss gradients: in the loss metric M a bin of tokens with gradients g costs tr(M^-1 sum g^T g), since the noise of
an optimal code is M^-1 but for its size. M is known when all gradients are, so a bin keeps products with a few fixed
signs z instead, and tr(M^-1 G) is the mean of z M^-1 G z^T (Hutchinson's estimator; M^-1 G is close to a multiple of
the identity, for which it is exact).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.attend import attention_weights
from aatc_cli.core.received_bins import BINS, EDGES, PROBES, watched_lags
from aatc_cli.core.tensor_cores import wide_products

_HOST = torch.device("cpu")
# queries of a tile, and attention weights that a GPU may hold at once
_TILE = 64
_WEIGHTS = 1 << 26


@lru_cache(maxsize=8)
def bin_edges(device: torch.device = _HOST) -> Tensor:
    """Edges between the bins of r, rising: float64 [BINS - 1], two to an octave. A bin holds its lower edge."""
    return torch.from_numpy(EDGES.copy()).to(device)


def received_attention(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    window: Window,
    *,
    sliding: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """r of every token from causal attention of ``query`` [B, J, T, D] over exact ``keys`` [B, H, T, D]. -> [B, T].

    Tokens whose last watching query lies beyond T have part of it.
    """
    lags = watched_lags(window)
    return received_by_head(query, keys, scaling, lags, sliding=sliding, sinks=sinks, softcap=softcap).sum(1)


def received_by_head(
    query: Tensor,
    keys: Tensor,
    scaling: float,
    lags: tuple[int, int],
    *,
    sliding: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """r of every token and kv head, of the queries at distances ``lags[0]`` .. ``lags[1]``. -> [B, H, T].

    From causal attention of ``query`` [B, J, T, D] over exact ``keys`` [B, H, T, D]. Queries go in tiles, so that no
    [T, T] is ever held.
    """
    batch, length, heads = query.shape[0], query.shape[2], keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(batch, heads, length, dtype=dtype, device=query.device)
    places = torch.arange(length, device=query.device)
    first, last = lags
    tile = _tile(query)
    for start in range(0, length, tile):
        end = min(start + tile, length)
        lag = places[start:end, None] - places[:end]
        allowed = (lag >= 0) if sliding is None else (lag >= 0) & (lag < sliding)
        with wide_products(query):
            weights = attention_weights(
                query[:, :, start:end], keys[:, :, :end], allowed, scaling, sinks=sinks, softcap=softcap
            )
        band = slice(max(start - last, 0), max(end - first, 0))
        watched = (lag[:, band] >= first) & (lag[:, band] <= last)
        by_head = torch.unflatten(weights[..., band], 1, (heads, -1))
        total[..., band] += (by_head * watched).square().sum((2, 3))
    return total


def _tile(query: Tensor) -> int:
    """Queries at a time: few on a CPU, whose caches are small; a GPU waits for every launch, so more of them."""
    batch, heads, length, _ = query.shape
    return _TILE if query.device.type == "cpu" else max(_TILE, min(4 * _TILE, _WEIGHTS // (batch * heads * length)))


def received_of(weights: Tensor, lag: Tensor, window: Window) -> Tensor:
    """What tokens receive from some queries: weights [B, J, n, S] at distances ``lag`` [n, S]. -> [B, S]."""
    first, last = watched_lags(window)
    watched = (lag >= first) & (lag <= last)
    return (weights.square().sum(1) * watched).sum(1)


@lru_cache(maxsize=32)
def probes(channels: int, device: torch.device = _HOST) -> Tensor:
    """The signs z: [C, PROBES] of 1 and -1, float64; a function of C alone."""
    generator = torch.Generator().manual_seed(channels)
    return (torch.randint(0, 2, (channels, PROBES), generator=generator).to(torch.float64) * 2 - 1).to(device)


def received_bins(received: Tensor) -> Tensor:
    """Bins of r: int64, the shape of ``received``."""
    return torch.bucketize(received.to(torch.float64), bin_edges(received.device), right=True)


def probe_sums(bins: Tensor, gradients: Tensor) -> Tensor:
    """Sum of g^T g z^T over the tokens of every bin: float64 [BINS, C, PROBES]. bins [N], gradients [N, C]."""
    g = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
    weights = torch.zeros(g.shape[0], BINS, PROBES, dtype=g.dtype, device=g.device)
    products = (g @ probes(g.shape[1], g.device).to(g.dtype))[:, None]
    weights.scatter_(1, bins[:, None, None].expand(-1, 1, PROBES), products)
    # one product with the gradients for all bins and signs
    return (weights.flatten(1).T @ g).view(BINS, PROBES, -1).transpose(1, 2).to(torch.float64)


def bin_costs(sums: Tensor, metric: Tensor) -> Tensor:
    """tr(M^-1 G) of every bin from its products ``sums`` [BINS, C, PROBES] and the loss metric M [C, C]. -> [BINS].

    M is damped by 1e-4 of its mean diagonal, as in the transform of that metric.
    """
    channels = metric.shape[0]
    damping = 1e-4 * metric.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    damped = (metric + metric.T) / 2 + damping * torch.eye(channels, dtype=metric.dtype, device=metric.device)
    solved = torch.linalg.solve(damped, probes(channels, metric.device))
    return torch.einsum("cp,bcp->b", solved, sums) / PROBES
