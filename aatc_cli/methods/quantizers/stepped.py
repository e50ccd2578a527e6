"""Stepped: evenly spaced cells whose codes take as many bits as they are unlikely; for stored caches.

Without a fixed size there are no planes to pad and no token scales, channels may take a quarter of a bit, and a loud
token takes more bits instead of more error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from aatc_cli.methods.quantizers.packable import Packable

if TYPE_CHECKING:
    from aatc_cli.core.stepped_codec import SteppedCodec
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.sites import Site


class Stepped(Packable):
    """Widths are resolutions, each half a bit finer than the one before."""

    name = "stepped"
    meaning = "even cells under an entropy code: widths are resolutions half a bit apart"
    curve = "stepped"
    packed = False
    kinds = ("tiled",)

    def check(self, recipe: RecipeFields) -> None:
        """Codes without a fixed size are those of chunks of tiles."""
        if getattr(recipe.tokens, "quotas", None) is None:
            raise ValueError('quantizer "stepped" goes with tokens in tiles: add [tokens] with quotas')
        if recipe.curve != self.name:
            raise ValueError('quantizer "stepped" goes with curve "stepped"')
        if getattr(recipe.tokens, "lowest_bits", 0):
            raise ValueError("lowest_bits is of codes of fixed size")

    def distortion(self) -> Sequence[float]:
        """Of levels moved outward, with what is the same for all tokens counted twice."""
        from aatc_cli.core.curves import restored
        from aatc_cli.core.stepped_tables import ERROR, RESTORED

        return restored(ERROR, RESTORED)

    def expected_bits(self) -> Sequence[float]:
        """Of a normal latent."""
        from aatc_cli.core.stepped_tables import BITS

        return BITS

    def read_back(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]:
        """As of Lloyd-Max levels: those of the cells are their centroids too, but for the outermost."""
        from aatc_cli.core.curves import restoring_gain
        from aatc_cli.core.stepped_tables import BITS, ERROR, RESTORED

        gains = [0.0, *(restoring_gain(error, RESTORED) for error in ERROR[1:])]
        share = [gain * (1.0 - error) for gain, error in zip(gains, ERROR, strict=True)]
        noise = [gain**2 * error * (1.0 - error) for gain, error in zip(gains, ERROR, strict=True)]
        return self.distortion(), BITS, share, noise

    def site_codec(self, choices: Choices, site: Site) -> SteppedCodec:
        """Matrices and cells in one."""
        from aatc_cli.core.stepped_codec import SteppedCodec

        found = super().site_codec(choices, site)
        return SteppedCodec(**{field.name: getattr(found, field.name) for field in fields(found)})
