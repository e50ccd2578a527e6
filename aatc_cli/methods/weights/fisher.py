"""Fisher: noise in a latent costs what measured loss gradients say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aatc_cli.methods.axes import Weight

if TYPE_CHECKING:
    from aatc_cli.core.allocate import Floats, SiteEnergy


class Fisher(Weight):
    """The loss metric in latent coordinates; energies are then in nats per position."""

    name = "fisher"
    meaning = "measured loss gradients: what is lost is then in nats"
    sides = ("k", "v")
    gradients = True
    in_nats = True
    tensor = "fisher"

    def energy(self, site: SiteEnergy, normal: Callable[[Floats], Floats], recipe: str) -> Floats:
        """Half of w sigma^2, never normalised; raises `AatcError` where the transform holds no gradients."""
        from aatc_cli.errors import AatcError

        if site.fisher is None or not site.fisher.any():
            raise AatcError(
                f"recipe {recipe} weighs by loss gradients, and the transform holds none",
                "collect with --fisher N (64 windows or more serve well), then whiten again",
            )
        return 0.5 * site.variance * site.fisher
