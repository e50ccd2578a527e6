"""Output norms: noise in a latent of values costs what the output projection makes of it (the paper's value weight)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Weight

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, SiteEnergy


class OutputNorm(Weight):
    """w^(V)[c] = ||(B^V W_O)_c||^2, not normalised."""

    name = "output"
    meaning = "the paper's, of values: norm of a latent behind the output projection"
    sides = ("v",)

    def energy(self, site: SiteEnergy, normal: Callable[[Floats], Floats], recipe: str) -> Floats:
        """The variance over its percentile, times the norm as it is."""
        found: Floats = normal(site.variance) * site.weight
        return found
