"""SQuat: min-max groups whose errors are kept orthogonal to what queries look at.

The channels of a head are coded block after block. What the codes of a block got wrong, d, moves the channels that are
still to be coded so that queries see least of it: with Q the leading directions of the queries times their singular
values, the error e of a key minimises |e|^2 + lambda |Q e|^2 where its coded part is d,

    e_rest = -(P_rest,rest)^-1 P_rest,block d,     P = I + lambda Q^T Q

Source: SQuat (2503.24358). Its base, for values too, is KIVI's quantizer (`grouped_minmax`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.quantizers.grouped_minmax import Grouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from aatc_cli.config import Geometry, HeadGroups
    from aatc_cli.core import Side
    from aatc_cli.core.layout import Widths
    from aatc_cli.core.overheads import Overheads
    from aatc_cli.core.stats import LayerStats
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site

# of heads of 128 channels: directions kept, and channels of a block; smaller heads keep the proportion
_HEAD, _DIRECTIONS, _BLOCK = 128, 60, 64
LAMBDA = 1e-3
# tokens of the prompt whose queries the original takes; Stats hold a mean over many more
PROMPT = 1024


class Squat(Grouped):
    """Its table is Q of every kv head, from the calibration's queries."""

    name = "squat"
    meaning = "grouped-minmax, errors of keys turned away from the queries"
    goes_with = together(allocator=("one-width",), transform=("identity",), coordinates=("pre-rope",))
    asked = True

    def check(self, recipe: RecipeFields) -> None:
        """Groups of keys lie along channels, as KIVI's."""
        if recipe.coding.key_axis != "channel":
            raise ValueError('quantizer "squat" goes with coding.key_axis "channel"')

    def tables(self, side: Side, stats: LayerStats, latents: Callable[[], Tensor], groups: int) -> dict[str, Tensor]:
        """For keys ``queries`` [H, r, D]: right singular vectors times singular values, the largest first."""
        import torch

        if side == "v":
            return {}
        values, vectors = torch.linalg.eigh(stats.q_outer.to(torch.float64) / stats.count * PROMPT)
        count = directions(int(values.shape[-1]))
        root = values.flip(-1)[:, :count].clamp_min(0).sqrt()
        return {"queries": (vectors.flip(-1)[..., :count] * root[:, None]).mT.contiguous()}

    def overheads(
        self, choices: Choices, geometry: Geometry, groups: HeadGroups, bits: Widths, blocks: int
    ) -> Overheads:
        """As grouped-minmax, and Q in float16."""
        found = super().overheads(choices, geometry, groups, bits, blocks)
        numbers = geometry.layers * geometry.channels * directions(geometry.head_dim)
        return replace(found, static={**found.static, "queries": 2 * numbers})

    def codec(self, choices: Choices, site: Site) -> Any:
        """Of values that of grouped-minmax."""
        import torch

        base = super().codec(choices, site)
        if site.side == "v":
            return base
        heads, dim = site.geometry.kv_heads, site.geometry.head_dim
        queries = site.read("queries", (heads, directions(dim), dim)).to(torch.float64)
        return SquatCodec(base, torch.eye(dim, dtype=torch.float64) + LAMBDA * queries.mT @ queries)


def directions(dim: int) -> int:
    """Directions of the queries that heads of ``dim`` channels keep."""
    return max(1, round(_DIRECTIONS * dim / _HEAD))


@dataclass(frozen=True)
class SquatCodec:
    """A codec of the keys of a layer. base: codes a block of channels; metric [H, D, D]: P of every kv head."""

    base: Any
    metric: Tensor

    def reconstruct(self, x: Tensor) -> Tensor:
        """The keys [..., T, C] as the cache returns them, in the dtype of ``x``; tokens behind the last group exact."""
        import torch

        heads, dim = self.metric.shape[0], self.metric.shape[-1]
        whole = x.shape[-2] // self.base.group * self.base.group
        left = torch.unflatten(x[..., :whole, :].to(torch.promote_types(x.dtype, torch.float32)), -1, (heads, dim))
        coded = torch.empty_like(left)
        for start, stop in pairwise([*range(0, dim, self._block(dim)), dim]):
            block = replace(self.base, bits=torch.unflatten(self.base.bits, 0, (heads, dim))[:, start:stop].flatten())
            found = block.reconstruct(left[..., start:stop].flatten(-2))
            coded[..., start:stop] = torch.unflatten(found, -1, (heads, stop - start))
            error = coded[..., start:stop] - left[..., start:stop]
            left = torch.cat((left[..., :stop], left[..., stop:] + self._moved(error, start, stop)), -1)
        return torch.cat((coded.flatten(-2).to(x.dtype), x[..., whole:, :]), -2)

    @staticmethod
    def _block(dim: int) -> int:
        return max(1, _BLOCK * dim // _HEAD)

    def _moved(self, error: Tensor, start: int, stop: int) -> Tensor:
        """What the error [..., H, stop - start] of coded channels moves those behind them by."""
        import torch

        rest, cross = self.metric[:, stop:, stop:], self.metric[:, stop:, start:stop]
        found: Tensor = torch.einsum("hrc,...hc->...hr", -torch.linalg.solve(rest, cross).to(error.dtype), error)
        return found

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> SquatCodec:
        """Move to a device; the metric stays in float64."""
        return SquatCodec(self.base.to(device), self.metric.to(device))
