"""Closed-loop fit of predictions from moments: what a decoder will hold is a linear map of the originals and noise.

A latent h of energy e read back from b bits is a h + n, with n apart from everything (`Coding`). So the decoded layer
is y = x P + (decoded layers below) Q + noise, and every moment that a least-squares fit on decoded vectors needs
follows from moments of the originals, layer after layer, without coding a single token:

    W_u = E[z^T z]^-1 E[z^T x_u],   R_u = E[r^T r] with r = x_u - z W_u,   transform and energies of R_u.

Moments of originals are there for a few layers apart. What lies further apart is taken to be related through the layers
between alone (a Markov chain of that order), which concerns what is left of the noise of distant layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aatc_cli.core.predictive import LayerMaps, Unit, Within, read_before
from aatc_cli.core.ridge import RIDGE, GrowingSolver, ridged_solve
from aatc_cli.core.transform import GroupTransform

_CHAIN_RIDGE = 1e-6
# of numbers that half precision holds
_LARGEST = 3e4


@dataclass(frozen=True)
class Coding:
    """What is read of a unit's latents: share [E] of each, noise [E] beside it; bits a token that coding takes."""

    share: Tensor
    noise: Tensor
    bits: float


@dataclass(frozen=True)
class FittedUnit:
    """A unit's residual: its transform and second moments [E] of its latents."""

    transform: GroupTransform
    energy: Tensor


# transform of a unit's residual from its second moment, and what coding it does
TransformOf = Callable[[int, Unit, Tensor], GroupTransform]
CodingOf = Callable[[int, Unit, FittedUnit], Coding]


@dataclass(frozen=True)
class Form:
    """The form of the maps: layers below that are read, units of the layer itself, numbers taken of those below.

    rank: of the layers below only so many numbers are read; 0: all. alone: a head group reads its own head group alone.
    """

    layers: int
    within: Within = "none"
    rank: int = 0
    alone: bool = False


@dataclass
class ClosedLoop:
    """Moments of what a decoder holds, layer after layer.

    cross(l, j) [2 C, 2 C]: E[x_{l-j}^T x_l] of originals for j up to ``lags``. decoded[i, j]: E[y_i^T y_j];
    mixed[i, m]: E[y_i^T x_m] of the layers that are still read.
    """

    cross: Callable[[int, int], Tensor]
    lags: int
    layers: int
    form: Form
    decoded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    mixed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    metric: Callable[[int], Tensor] | None = None
    # of originals alone: whoever goes through the layers again at another rate hands them on
    chain: dict[int, Tensor] = field(default_factory=dict)

    def fit(
        self, layer: int, units: Sequence[Unit], transform_of: TransformOf, coding_of: CodingOf
    ) -> tuple[LayerMaps, list[FittedUnit], float]:
        """Maps, residuals and bits a token of one layer; layers must come in their order."""
        below = [layer - j for j in range(1, self.form.layers + 1) if layer - j >= 0]
        own = self.cross(layer, 0)
        size = own.shape[0]
        szz, szx = self._of_below(below, layer, size)
        squeeze = self._squeeze(layer, szz, szx) if self.form.rank and below else None
        if squeeze is not None:
            szz, szx = squeeze.T @ szz @ squeeze, squeeze.T @ szx
        rows = szz.shape[0]
        # moments of all that may be read, the units of this layer last; filled as they are coded
        moments, with_own = szz.new_zeros(rows + size, rows + size), szz.new_zeros(rows + size, size)
        moments[:rows, :rows], with_own[:rows] = szz, szx
        whole = szz.new_zeros(rows + size, size)
        through, noise = szz.new_zeros(size, size), szz.new_zeros(size, size)
        fitted, bits, solver = [], 0.0, GrowingSolver(moments, with_own)
        for unit, before in zip(units, read_before(list(units), self.form.within), strict=True):
            read = self._read(unit, rows, before, size)
            map_ = solver.solved(read, unit)
            whole[:, unit.columns] = map_
            left = with_own[:, unit.columns] - moments @ map_  # E[z^T r]
            residual = own[unit.columns, unit.columns] - map_.T @ with_own[:, unit.columns]
            residual = residual - map_.T @ left
            residual = (residual + residual.T) / 2
            transform = transform_of(layer, unit, residual)
            encode, decode = transform.encode, transform.decode
            energy = ((residual @ encode) * encode).sum(0).clamp_min(0)
            fitted.append(FittedUnit(transform, energy))
            coding = coding_of(layer, unit, fitted[-1])
            bits += coding.bits
            a = (encode * coding.share) @ decode
            n = (decode.T * coding.noise) @ decode
            through[unit.columns, unit.columns], noise[unit.columns, unit.columns] = a, n
            place = slice(rows + unit.columns.start, rows + unit.columns.stop)
            # y_u = z W + r A + n
            with_own[place] = map_.T @ with_own + a.T @ (own[unit.columns] - map_.T @ with_own)
            beside = map_.T @ moments + a.T @ (with_own[:, unit.columns].T - map_.T @ moments)
            cross = map_.T @ left @ a
            square = map_.T @ moments @ map_ + cross + cross.T + a.T @ residual @ a + n
            moments[place], moments[:, place] = beside, beside.T
            moments[place, place] = square
        inside = whole[rows:]
        outside = whole[:rows] if squeeze is None else squeeze @ whole[:rows]
        self._advance(layer, below, moments[rows:, rows:], through, inside, outside)
        maps = LayerMaps(whole[:rows], inside if self.form.within != "none" else inside[:0], squeeze)
        return maps, fitted, bits

    def _of_below(self, below: list[int], layer: int, size: int) -> tuple[Tensor, Tensor]:
        """E[z^T z] and E[z^T x] of the decoded layers below."""
        if not below:
            own = self.cross(layer, 0)
            return own.new_zeros(0, 0), own.new_zeros(0, size)
        szz = torch.cat([torch.cat([self._decoded(i, j) for j in below], 1) for i in below], 0)
        return szz, torch.cat([self._mixed(i, layer) for i in below], 0)

    def _decoded(self, i: int, j: int) -> Tensor:
        return self.decoded[i, j] if (i, j) in self.decoded else self.decoded[j, i].T

    def _mixed(self, i: int, m: int) -> Tensor:
        """E[y_i^T x_m], m above i; beyond what the recursion gave through the layers between."""
        if (i, m) not in self.mixed:
            between = [m - j for j in range(1, self.lags + 1)]
            if m not in self.chain:
                gram = torch.cat([torch.cat([self._originals(a, b) for b in between], 1) for a in between], 0)
                target = torch.cat([self._originals(a, m) for a in between], 0)
                self.chain[m] = ridged_solve(gram, target, _CHAIN_RIDGE)
            self.mixed[i, m] = torch.cat([self._mixed(i, a) for a in between], 1) @ self.chain[m]
        return self.mixed[i, m]

    def _originals(self, a: int, b: int) -> Tensor:
        """E[x_a^T x_b]."""
        return self.cross(b, b - a) if b >= a else self.cross(a, a - b).T

    def _read(self, unit: Unit, rows: int, before: list[slice], size: int) -> Tensor:
        """Numbers of the regressors that a unit may read."""
        parts = [torch.arange(rows)]
        if self.form.alone and rows:
            width = unit.columns.stop - unit.columns.start
            head = (unit.columns.start % (size // 2)) // width
            side = torch.arange(rows) % (size // 2)
            parts = [torch.arange(rows)[side // width == head]]
        parts += [torch.arange(rows + columns.start, rows + columns.stop) for columns in before]
        return torch.cat(parts)

    def _squeeze(self, layer: int, szz: Tensor, szx: Tensor) -> Tensor:
        """The numbers of the layers below that tell most, in loss: a reduced-rank regression."""
        assert self.metric is not None
        whole = ridged_solve(szz, szx, RIDGE)
        told = whole.T @ szz @ whole
        factor = self.metric(layer)
        _, basis = torch.linalg.eigh(factor.T @ told @ factor)
        found = whole @ factor @ basis.flip(1)[:, : self.form.rank]
        # of unit size where half precision holds that; what is read may be very small
        scale = ((szz @ found) * found).sum(0).clamp_min(1e-30).rsqrt()
        scale = scale.minimum(_LARGEST / found.abs().amax(0).clamp_min(1e-30))
        rounded: Tensor = (found * scale).half().to(szz.dtype)
        return rounded

    def _advance(
        self, layer: int, below: list[int], square: Tensor, through: Tensor, inside: Tensor, outside: Tensor
    ) -> None:
        """Moments of the layer that is decoded now with itself, with those below and with originals above."""
        size = square.shape[0]
        eye = torch.eye(size, dtype=square.dtype, device=square.device)
        rest = eye - through
        # y = x P + (layers below) Q + noise: units read units before, so the system is triangular
        solve = torch.linalg.inv(eye - inside @ rest)
        p, q = through @ solve, outside @ rest @ solve
        self.decoded[layer, layer] = (square + square.T) / 2
        for i in below:
            told = torch.cat([self._decoded(j, i) for j in below], 0) if below else None
            found = p.T @ self._mixed(i, layer).T
            self.decoded[layer, i] = found if told is None else found + q.T @ told
        self.mixed[layer, layer] = p.T @ self.cross(layer, 0) + (
            q.T @ torch.cat([self._mixed(i, layer) for i in below], 0) if below else 0.0
        )
        for m in range(layer + 1, min(layer + self.lags, self.layers - 1) + 1):
            found = p.T @ self.cross(m, m - layer)
            if below:
                found = found + q.T @ torch.cat([self._mixed(i, m) for i in below], 0)
            self.mixed[layer, m] = found
        gone = layer - self.form.layers - self.lags
        for table in (self.decoded, self.mixed):
            for key in [key for key in table if key[0] < gone]:
                del table[key]
