"""What coding does to latents at a water level: widths that serve best there, and what is read back at them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core.predictive_fit import Coding


@dataclass(frozen=True)
class ReadBack:
    """A quantizer on a channel of energy 1, by width [W]: what error costs, its bits, and what is read of a latent.

    A latent h is read as share h + noise, the noise apart from h and of mean square ``noise``.
    """

    cost: Tensor
    bits: Tensor
    share: Tensor
    noise: Tensor

    def to(self, device: torch.device) -> ReadBack:
        """On a device."""
        return ReadBack(*(part.to(device) for part in (self.cost, self.bits, self.share, self.noise)))


@dataclass(frozen=True)
class ClassCosts:
    """Classes of tokens. shares [n] of all tokens; costs [n, E]: of noise in each, relative to the average token."""

    shares: Tensor
    costs: Tensor


def planned_coding(
    energy: Tensor, price: Tensor, classes: ClassCosts, table: ReadBack, level: float, scale_bits: int
) -> tuple[Coding, float]:
    """What coding a unit does at ``level`` nats a bit, and the nats that it leaves.

    energy [E]: second moments of the latents; price [E]: nats that noise in each costs. A unit that codes anything in a
    class pays ``scale_bits`` a token there.
    """
    worth = energy * price * classes.costs
    widths = (worth[..., None] * table.cost + level * table.bits).argmin(-1)
    shares = classes.shares[:, None]
    share = (shares * table.share[widths]).sum(0)
    # of what is read back in the mean over classes; what classes differ in is noise too
    square = (shares * (table.share[widths].square() + table.noise[widths])).sum(0)
    rate = table.bits[widths].sum(1) + scale_bits * (widths > 0).any(1)
    left = float((shares * worth * table.cost[widths]).sum())
    return Coding(share, (square - share.square()).clamp_min(0) * energy, float(classes.shares @ rate)), left
