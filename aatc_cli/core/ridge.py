"""Least squares from moments, every regressor made louder by a share of its own energy."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.predictive import Unit

# of the mean square of every regressor: what a fit on a sample and noise of another size than planned can bear
RIDGE = 1e-3


class GrowingSolver:
    """Least squares of units whose regressors grow: the Cholesky factor of what was read before is taken further.

    Every regressor is made louder by `RIDGE` of its own energy; moments [z, z] and with_own [z, 2 C] are filled by the
    caller as units are coded.
    """

    def __init__(self, moments: Tensor, with_own: Tensor) -> None:
        self.moments, self.with_own = moments, with_own
        self.read: list[int] = []
        self.factor = moments.new_zeros(0, 0)
        self.size = moments.new_zeros(0)

    def solved(self, read: Tensor, unit: Unit) -> Tensor:
        """The map of a unit from all regressors [z, E], zero for those it does not read, as half precision holds it."""
        found = torch.zeros_like(self.with_own[:, unit.columns])
        wanted = read.tolist()
        if not wanted:
            return found
        if wanted[: len(self.read)] != self.read:
            self.read, self.factor, self.size = [], self.factor.new_zeros(0, 0), self.size.new_zeros(0)
        if len(wanted) > len(self.read):
            self._extend(wanted)
        places = read.to(found.device)
        target = self.size[:, None] * self.with_own[places][:, unit.columns]
        found[places] = self.size[:, None] * torch.cholesky_solve(target, self.factor)
        limit = torch.finfo(torch.float16).max
        return found.clamp(-limit, limit).half().to(found.dtype)

    def _extend(self, wanted: list[int]) -> None:
        """Take the factor of the regressors read so far on to all that are wanted."""
        device = self.moments.device
        old, new = (
            torch.tensor(part, device=device, dtype=torch.int64) for part in (self.read, wanted[len(self.read) :])
        )
        size = self.moments.diagonal()[new].clamp_min(1e-30).rsqrt()
        corner = self.moments[new][:, new] * size[:, None] * size
        corner.diagonal().add_(RIDGE)
        border = self.moments[new][:, old] * size[:, None] * self.size
        side = torch.linalg.solve_triangular(self.factor, border.T, upper=False).T if old.numel() else border
        lower = torch.linalg.cholesky(corner - side @ side.T)
        above = torch.cat((self.factor, self.factor.new_zeros(old.numel(), new.numel())), 1)
        self.factor = torch.cat((above, torch.cat((side, lower), 1)), 0)
        self.size = torch.cat((self.size, size))
        self.read = wanted


def ridged_solve(gram: Tensor, target: Tensor, ridge: float) -> Tensor:
    """Least squares with every regressor made louder by ``ridge`` of its own energy."""
    size = gram.diagonal().clamp_min(1e-30).rsqrt()
    scaled = gram * size[:, None] * size
    scaled.diagonal().add_(ridge)
    factor = torch.linalg.cholesky(scaled)
    return size[:, None] * torch.cholesky_solve(size[:, None] * target, factor)
