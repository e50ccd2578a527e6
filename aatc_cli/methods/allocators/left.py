"""What allocators predict that are not chosen by a curve: energy 4^-b, as for the recipes of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.core import Side
    from aatc_cli.core.allocate import Energies, Ints
    from aatc_cli.methods.choices import Choices


def exponential_left(choices: Choices, energies: Energies, bits: Sequence[Mapping[Side, Ints]]) -> dict[Side, float]:
    """Sum of energy 4^-b over all channels of a side; exactly rounded."""
    from aatc_cli.core import SIDES
    from aatc_cli.core.allocate import quarter_powers

    return {
        side: math.fsum(
            math.fsum(choices.energy(layer[side], side) * quarter_powers(widths[side]))
            for layer, widths in zip(energies, bits, strict=True)
        )
        for side in SIDES
    }
