"""Evenly spaced levels of a unit normal, with a searched token scale."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.methods.quantizers.packable import Packable


class UniformLevels(Packable):
    """The best step of every width: levels that need no table, as the fused kernels read them."""

    name = "uniform"
    meaning = "evenly spaced levels, searched token scale"
    curve = "uniform"

    def distortion(self) -> Sequence[float]:
        """That of the best step on a unit normal."""
        from aatc_cli.core.curves import DISTORTION_UNIFORM

        return DISTORTION_UNIFORM
