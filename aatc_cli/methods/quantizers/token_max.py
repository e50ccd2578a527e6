"""Uniform levels over the largest magnitude of a token (the paper's)."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.methods.quantizers.packable import Packable


class TokenMax(Packable):
    """The paper's "right scaling": a token scale from the maximum of h / s."""

    name = "uniform-token-max"
    meaning = "the paper's: uniform levels over the token's largest magnitude"
    curve = "exponential"

    def distortion(self) -> Sequence[float]:
        """4^-b."""
        from aatc_cli.core.curves import EXPONENTIAL

        return EXPONENTIAL
