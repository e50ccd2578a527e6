"""Restored: levels moved outward when codes are read, so that what coding takes off a latent is half given back.

The mean of a cell is nearer to zero than most of the cell, so the levels with the least squared error make every latent
smaller: by D on average, of a quantizer with error D. Such an error is the same for all tokens and adds up in a sum
over them, where the rest averages out. The curve counts it twice (`core.curves.restored`).
"""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.methods.quantizers.packable import Packable


class RestoredLloyd(Packable):
    """Lloyd-Max cells, levels of them moved outward."""

    name = "lloyd-restored"
    meaning = "Lloyd-Max cells, levels moved outward, searched token scale"
    curve = "lloyd-restored"
    levels = "lloyd"
    restored = 0.5

    def distortion(self) -> Sequence[float]:
        """Of the moved levels, with what is the same for all tokens counted twice."""
        from aatc_cli.core.curves import DISTORTION, restored

        return restored(DISTORTION, self.restored)


class RestoredUniform(Packable):
    """Even cells, levels of them moved outward."""

    name = "uniform-restored"
    meaning = "even cells, levels moved outward, searched token scale"
    curve = "uniform-restored"
    levels = "uniform"
    restored = 0.5

    def distortion(self) -> Sequence[float]:
        """As of Lloyd-Max cells."""
        from aatc_cli.core.curves import DISTORTION_UNIFORM, restored

        return restored(DISTORTION_UNIFORM, self.restored)
