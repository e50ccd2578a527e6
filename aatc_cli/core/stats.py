"""Streaming second moments and sampled rows of one layer's keys, values and queries, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from aatc_cli.config import Geometry, Window
from aatc_cli.core import Side
from aatc_cli.core.tensor_cores import wide_products
from aatc_cli.core.tile_rule import tile_lags
from aatc_cli.core.tile_sizes import RANKS, TILE
from aatc_cli.core.weights import fisher_weights, shrunk

# parts of the tokens in which the products of queries are summed apart, where they divide them
_PARTS = 4


@dataclass
class LayerStats:
    """Sums over calibration tokens of one layer. All sums are float64; nothing is divided by the count yet.

    k_outer, v_outer [C, C]: sum of k k^T and v v^T, keys before RoPE, projection biases removed.
    k_sum, v_sum [C]: sum of k and of v. q_outer [H, D, D]: sum of q q^T over tokens and the G query heads of each kv
    head, queries before RoPE. o_gram [H, D, D]: sum over the G query heads of W_O^h (W_O^h)^T, a fact of the model.
    k_rows, v_rows [R, C] float32: a fixed-seed sample of rows for percentiles. k_fisher, v_fisher [C, C]: sum of g g^T
    over tokens, g the gradient of the log-likelihood of sampled tokens at a cached vector; zero until it is collected.
    k_ranks, v_ranks [2, RANKS, H, D, D]: sum of g g^T of each kv head over the tokens of whole tiles, by groups
    of ranks in the tile (`core.tile_classes`): in the order of the layer, and in that of the head itself.
    cross [n + 1, 2 C, 2 C]: sum of x x'^T, x' = (k, v) of this layer and x that of itself and of the 1, 2, ... n
    compressed layers below; zero where there is none. [0, 2 C, 2 C] unless collect was asked for it.
    readers: positions whose sampled tokens are in that log-likelihood, over all windows with gradients.
    """

    count: int
    k_outer: Tensor
    v_outer: Tensor
    k_sum: Tensor
    v_sum: Tensor
    q_outer: Tensor
    o_gram: Tensor
    k_rows: Tensor
    v_rows: Tensor
    k_fisher: Tensor
    v_fisher: Tensor
    k_ranks: Tensor
    v_ranks: Tensor
    cross: Tensor
    filled: int = field(default=0)
    readers: int = field(default=0)

    TENSORS: ClassVar[tuple[str, ...]] = (
        "k_outer",
        "v_outer",
        "k_sum",
        "v_sum",
        "q_outer",
        "o_gram",
        "k_rows",
        "v_rows",
        "k_fisher",
        "v_fisher",
        "k_ranks",
        "v_ranks",
        "cross",
    )
    OPTIONAL: ClassVar[tuple[str, ...]] = ("k_ranks", "v_ranks", "cross")

    @classmethod
    def empty(cls, geometry: Geometry, rows: int, o_gram: Tensor, below: int = 0) -> LayerStats:
        """Zero sums for a layer of ``geometry``, with room for ``rows`` sampled rows, on the device of ``o_gram``.

        below: layers below with which its keys and values are multiplied.
        """
        channels, device = geometry.channels, o_gram.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        heads, dim = geometry.kv_heads, geometry.head_dim
        return cls(
            count=0,
            k_outer=zeros(channels, channels),
            v_outer=zeros(channels, channels),
            k_sum=zeros(channels),
            v_sum=zeros(channels),
            q_outer=zeros(heads, dim, dim),
            o_gram=o_gram.to(torch.float64),
            k_rows=zeros(rows, channels, dtype=torch.float32),
            v_rows=zeros(rows, channels, dtype=torch.float32),
            k_fisher=zeros(channels, channels),
            v_fisher=zeros(channels, channels),
            k_ranks=zeros(2, RANKS, heads, dim, dim),
            v_ranks=zeros(2, RANKS, heads, dim, dim),
            cross=zeros(below + 1 if below else 0, 2 * channels, 2 * channels),
        )

    def update(self, q: Tensor, k: Tensor, v: Tensor, sample: Tensor) -> None:
        """Add N tokens: ``q`` [..., H * G, D], ``k`` and ``v`` [..., C]; keep the rows named by ``sample`` (indices).

        The dimensions in front hold N together. Factors and sums are float64. Keys and values are one batch of two
        products, and queries one of a product per query head and part of the tokens, so that a GPU is filled.
        """
        heads, dim = self.q_outer.shape[:2]
        count, channels = k.shape[:-1].numel(), k.shape[-1]
        pair = torch.empty(2, count, channels, dtype=torch.float64, device=k.device)
        for place, (rows, total) in enumerate(((k, self.k_sum), (v, self.v_sum))):
            pair[place].view(k.shape).copy_(rows)
            total += pair[place].sum(0)
        outer = pair.mT @ pair
        self.k_outer += outer[0]
        self.v_outer += outer[1]
        by_head = torch.empty(q.shape[-2], count, dim, dtype=torch.float64, device=q.device)
        by_head.view(q.shape[-2], *q.shape[:-2], dim).copy_(q.movedim(-2, 0))
        parts = by_head.view(-1, count // math.gcd(count, _PARTS), dim)
        self.q_outer += (parts.mT @ parts).view(heads, -1, dim, dim).sum(1)
        self.count += count
        end = self.filled + sample.numel()
        self.k_rows[self.filled : end] = pair[0][sample]
        self.v_rows[self.filled : end] = pair[1][sample]
        self.filled = end

    def add_cross(self, rows: Sequence[Tensor]) -> None:
        """Add N tokens: ``rows`` [N, 2 C] float64, (k, v) of this layer and then of those below, the nearest first."""
        if self.cross.shape[0]:
            for place, below in enumerate(rows[: self.cross.shape[0]]):
                self.cross[place] += below.to(rows[0].device).T @ rows[0]

    def to(self, device: torch.device | str) -> LayerStats:
        """The same sums and rows on ``device``."""
        return replace(self, **{name: getattr(self, name).to(device) for name in self.TENSORS})

    def mean(self, side: Side) -> Tensor:
        """Mean vector of a site. [C]."""
        return (self.k_sum if side == "k" else self.v_sum) / self.count

    def loss_metric(self, side: Side) -> Tensor:
        """M of one side [C, C]: what noise d in every cached vector costs is d M d^T / 2 nats per position."""
        return (self.k_fisher if side == "k" else self.v_fisher) / max(self.readers, 1)

    def add_gradients(self, side: Side, gradients: Tensor) -> None:
        """Add g g^T of the loss gradients [N, C] at cached keys or values.

        Products in float32 at least, sums in float64: next to the error of sampling, rounding is nothing here.
        """
        g = gradients.to(torch.promote_types(gradients.dtype, torch.float32))
        total = self.k_fisher if side == "k" else self.v_fisher
        with wide_products(gradients):
            total += g.T @ g

    def add_ranked(self, side: Side, received: Tensor, gradients: Tensor, window: Window) -> None:
        """Add the loss gradients [B, T, C] of one side by the ranks of the tokens, which received [B, H, T].

        Only tiles count that every query that watches them was there for.
        """
        tiles = max(gradients.shape[1] - window.sinks - tile_lags(window.recent)[1], 0) // TILE
        if not tiles:
            return
        whole = slice(window.sinks, window.sinks + tiles * TILE)
        heads, dim = self.q_outer.shape[:2]
        rows = gradients[:, whole].to(torch.promote_types(gradients.dtype, torch.float32))
        by_head = torch.unflatten(rows, 2, (heads, dim)).transpose(1, 2)
        by_tile = torch.unflatten(by_head, 2, (tiles, TILE))
        total = self.k_ranks if side == "k" else self.v_ranks
        own = torch.unflatten(received[..., whole], 2, (tiles, TILE))
        for place, scores in enumerate((own.sum(1, keepdim=True).expand_as(own), own)):
            order = scores.argsort(dim=-1, stable=True)[..., None].expand(*by_tile.shape)
            ranked = torch.unflatten(by_tile.gather(3, order), 3, (RANKS, -1))
            # [H, RANKS, B * tiles * tokens, D]: groups hold equally many tokens
            groups = ranked.permute(1, 3, 0, 2, 4, 5).flatten(2, 4)
            with wide_products(gradients):
                total[place] += (groups.mT @ groups).transpose(0, 1)

    @property
    def ranked(self) -> bool:
        """Whether gradients were added by rank."""
        return bool(self.k_ranks.any())

    def rank_costs(self, side: Side, decode: Tensor, shrinkage: float, heads: slice | None = None) -> Tensor:
        """What noise in a latent channel costs for tokens of each group of ranks, relative to the average token.

        decode [groups, E, E] -> float64 [2, RANKS, C], in the order of the layer and of each head; means over the ranks
        are 1. heads: kv heads that ``decode`` is of, where not all. Heads that share a group count one by one: what
        they cost together is taken to be in proportion.
        """
        ranks = self.k_ranks if side == "k" else self.v_ranks
        found = []
        for order in (ranks if heads is None else ranks[:, :, heads]).to(torch.float64):
            blocks = [shrunk(torch.block_diag(*group), shrinkage) for group in order]  # type: ignore[no-untyped-call]
            costs = torch.stack([fisher_weights(decode, block) for block in blocks])
            mean = costs.mean(0)
            found.append(torch.where(mean > 0, costs / torch.where(mean > 0, mean, torch.ones_like(mean)), 1.0))
        return torch.stack(found)

    def tensors(self) -> dict[str, Tensor]:
        """The sums and the rows kept so far, by field name; sums by rank only where gradients were taken."""
        absent = [name for name in self.OPTIONAL if not bool(getattr(self, name).any())]
        parts: dict[str, Tensor] = {name: getattr(self, name) for name in self.TENSORS if name not in absent}
        return parts | {name: parts[name][: self.filled] for name in ("k_rows", "v_rows")}


def output_gram(weight: Tensor, geometry: Geometry) -> Tensor:
    """Per kv head, sum over its G query heads of W_O^h (W_O^h)^T, from o_proj's weight [M, heads * D]. -> [H, D, D].

    With it, ||(B^V W_O)_c||^2 is a quadratic form in row c of B^V (paper, Eq. waterfilling for the values).
    """
    rows = weight.detach().to(torch.float64).T.reshape(geometry.kv_heads, -1, geometry.head_dim, weight.shape[0])
    return torch.einsum("hgdm,hgem->hde", rows, rows)


def sample_rows(seed: int, window: int, tokens: int, quota: int) -> Tensor:
    """``quota`` sorted distinct token positions of one window, a function of (seed, window) alone.

    The sample is stratified over windows, so it does not depend on batch size, on resuming, or on worker count.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + window) % (2**63))
    return torch.randperm(tokens, generator=generator)[:quota].sort().values
