"""A floor under the lowest class of tiles: its energies weigh more until it is bought enough bits.

The class that received least attention is where a token stands that nobody read yet and somebody will need. Least
loss under "class 0 has at least so many bits" is, by its multiplier, least loss with the energies of class 0 times a
factor of 1 or more; the least such factor is searched, and the budget is that of the plan without a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.tile_allocate import spent_bits
from aatc_cli.core.tile_options import Ints, Units
from aatc_cli.errors import AatcError

# doublings of the factor before the floor is given up, and halvings of the step that reaches it
_DOUBLINGS = 40
_HALVINGS = 6

Buy = Callable[[Sequence[Units]], tuple[list[Ints], float]]
Masks = Sequence[NDArray[np.bool_]]


def allocate_floored(
    pool: Sequence[Units], lowest: Masks, least: int, scale_bits: int, buy: Buy
) -> tuple[list[Ints], float]:
    """What ``buy`` gives of a pool in which units of the ``lowest`` class take ``least`` bits of a tile or more.

    lowest: of every part of the pool, a mask [U]. ``buy`` takes a pool and gives widths [U, E] of every part and the
    level. Raises `AatcError` where the budget does not pay for the floor.
    """

    def bought(power: float) -> tuple[tuple[list[Ints], float], bool]:
        factor = 2.0**power
        weighed = [
            Units(np.where(mask[:, None], factor * units.energy, units.energy), units.tokens)
            for units, mask in zip(pool, lowest, strict=True)
        ]
        found = buy(weighed)
        return found, _bits(pool, lowest, found[0], scale_bits) >= least

    found, enough = bought(0.0)
    if enough:
        return found
    low, high = 0.0, 1.0
    while not (attempt := bought(high))[1]:
        low, high = high, high + 1.0
        if high > _DOUBLINGS:
            raise AatcError(
                f"the budget does not pay for the floor of the lowest class: {least} bits of a tile are asked for it",
                "raise the budget, or lower tokens.lowest_bits of the recipe",
            )
    found = attempt[0]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        attempt = bought(middle)
        if attempt[1]:
            high, found = middle, attempt[0]
        else:
            low = middle
    return found


def _bits(pool: Sequence[Units], lowest: Masks, widths: Sequence[Ints], scale_bits: int) -> int:
    """Bits of a tile that the lowest class takes."""
    parts = [Units(units.energy[mask], units.tokens[mask]) for units, mask in zip(pool, lowest, strict=True)]
    return spent_bits(parts, [bits[mask] for bits, mask in zip(widths, lowest, strict=True)], scale_bits)
