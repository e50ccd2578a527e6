"""Query energy: noise in a latent of keys costs what the queries see of it (the paper's key weight)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Weight

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, SiteEnergy


class QueryEnergy(Weight):
    """w^(K)[c] = sum E[(B_c q)^2], normalised like the variance."""

    name = "query"
    meaning = "the paper's, of keys: energy of the queries along a latent"
    sides = ("k",)

    def energy(self, site: SiteEnergy, normal: Callable[[Floats], Floats], recipe: str) -> Floats:
        """Both factors over their percentile."""
        found: Floats = normal(site.variance) * normal(site.weight)
        return found
