"""Lloyd-Max levels of a unit normal, with a searched token scale."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.methods.quantizers.packable import Packable


class Lloyd(Packable):
    """Every level the mean of its cell."""

    name = "lloyd"
    meaning = "Lloyd-Max levels, searched token scale"
    curve = "lloyd"

    def distortion(self) -> Sequence[float]:
        """Lloyd-Max's on a unit normal."""
        from aatc_cli.core.curves import DISTORTION

        return DISTORTION
