"""Whether two packings of tiles differ where roundings of float32 decide, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aatc_cli.core import SIDES, Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.lloyd import CANDIDATES, Tables
from aatc_cli.core.scales import rounded_scale
from aatc_cli.core.tiles import TILE
from aatc_cli.runtime.fused_tiles.records import RecordTiles

# half the distance of neighbouring float32 numbers about one
_ROUNDING = 2.0**-24
# roundings of a latent's share, of a scale's and of their product in either search, beside those of a sum
_STEPS = 8
# tokens of a class that are looked into
_MOST = 100


def undecided(held: RecordTiles, rows: Mapping[Side, Tensor], one: Tensor, other: Tensor) -> tuple[int, float]:
    """Tokens of a head and side that two packings of ``rows`` [b, n, C] code differently, and whether they may.

    The latter is the largest `_excess` of either choice, up to 1 if roundings explain it; infinite where classes
    differ. Packings are [b, tiles, nbytes].
    """
    (mine, places), (theirs, others) = held.coded(one), held.coded(other)
    if not torch.equal(places, others):
        return int((places != others).sum()), float("inf")
    count, most = 0, 0.0
    for side in SIDES:
        codec = held.sides[side].codec
        inner = replace(codec.codec, restored=0.0)
        latents, slack = (by_rank(one, places) for one in _latents(inner, rows[side], held.heads))
        start = 0
        for k, quota in enumerate(held.rule.quotas):
            (codes, scales), (codes2, scales2) = mine[side][k], theirs[side][k]
            differs = (codes != codes2).any(-1) | (scales != scales2)
            for b, m, i, head in differs.nonzero().tolist()[:_MOST]:
                facts = _Facts.of(inner, codec.bits[k], head, held.size)
                for found, scale in ((codes, scales), (codes2, scales2)):
                    given = latents[b, m, head, start + i], slack[b, m, head, start + i]
                    most = max(most, facts.excess(*given, found[b, m, i, head], scale[b, m, i, head]))
            count += int(differs.sum())
            start += quota
    return count, most


def _latents(codec: TransformCodec, rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Latents float64 of rows [b, n, C], and how far those of a product in float32 may be: [b, tiles, 64, H, D]."""
    by_head = torch.unflatten(torch.unflatten(rows.to(torch.float64), -2, (-1, TILE)), -1, (heads, -1))
    matrix = codec.encode.to(torch.float64)
    exact, sizes = (
        torch.einsum("...ge,gef->...gf", one, other)
        for one, other in ((by_head, matrix), (by_head.abs(), matrix.abs()))
    )
    return exact, (matrix.shape[-2] + _STEPS) * _ROUNDING * sizes


def by_rank(latents: Tensor, places: Tensor) -> Tensor:
    """Latents [b, tiles, t, H, D] by head and rank: [b, tiles, H, t, D]; places [b, tiles, H, t]."""
    return latents.transpose(-3, -2).gather(-2, places[..., None].expand(-1, -1, -1, -1, latents.shape[-1]))


@dataclass(frozen=True)
class _Facts:
    """What a search for scale and codes of one head and class goes by, in float64, of its n coded channels."""

    coded: Tensor
    centre: Tensor
    spread: Tensor
    price: Tensor
    tables: Tables

    @classmethod
    def of(cls, codec: TransformCodec, bits: Tensor, head: int, size: int) -> _Facts:
        """Of the channels of ``head`` at widths ``bits`` [C]."""
        part = slice(head * size, (head + 1) * size)
        like = torch.zeros(size, dtype=torch.float64)
        tables = Tables.of(bits[part].cpu(), like, codec.quantizer == "uniform")
        parts = [
            like if given is None else given[part].cpu().to(torch.float64)
            for given in (codec.centre, codec.variance.sqrt())
        ]
        weight = like + 1 if codec.weight is None else codec.weight[part].cpu().to(torch.float64)
        centre, spread, price = (one[tables.order] for one in (*parts, weight * parts[1].square()))
        return cls(tables.order, centre, torch.where(spread > 0, spread, torch.ones_like(spread)), price, tables)

    def excess(self, latents: Tensor, slack: Tensor, codes: Tensor, scale: Tensor) -> float:
        """The weighted error of codes [E] from zero on and a scale, less that of the best scale, in roundings.

        latents, slack [E]: exact ones, and how far those of a search may be from them. A candidate that rounding may
        put on either of two scales is the worse of them. Up to 1 where the choice is one that a search in float32 can
        make; infinite for a scale that is no candidate.
        """
        unit = (latents.cpu().to(torch.float64)[self.coded] - self.centre) / self.spread
        off = slack.cpu().to(torch.float64)[self.coded] / self.spread
        count, rms = len(unit), unit.square().mean().sqrt()
        turned = (count + _STEPS) * _ROUNDING + float(off.norm() / unit.norm().clamp_min(1e-300))
        worst, allowed = [], []
        for factor in CANDIDATES:
            near = [rms * factor * (1 + turn * turned) for turn in (-1, 1)]
            scales = [float(rounded_scale(one, 8)) for one in near]
            allowed += scales
            worst.append(max(self._error(unit, self.tables.rounded(unit.abs() / one) * one) for one in scales))
        if float(scale) not in allowed:
            return float("inf")
        index = codes.cpu()[self.coded].to(torch.float64)
        levels = torch.cat([span.values(index[span.channels]) for span in self.tables.spans]) * float(scale)
        own = self._error(unit, torch.where(levels * unit < 0, -levels.abs(), levels.abs()))
        energy = float((self.price * unit.square()).sum())
        moved = 2 * _ROUNDING * ((count + _STEPS) * own + _STEPS * (own * energy) ** 0.5)
        other = float((self.price * off.square()).sum())
        moved += 4 * (own * other) ** 0.5 + 2 * other
        return (own - min(worst)) / moved if moved else 0.0

    def _error(self, unit: Tensor, magnitude: Tensor) -> float:
        """The weighted squared error of levels of ``magnitude``, below zero where they are of the other sign."""
        return float((self.price * (unit.abs() - magnitude).square()).sum())
