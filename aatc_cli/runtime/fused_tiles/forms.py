"""Forms of classes: how many steps of 32 digits of each size both sides have. The kernel has a walk for every form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aatc_cli.core import SIDES, Side
from aatc_cli.runtime.fused_tiles.digits import ROWS, SIZES
from aatc_cli.runtime.fused_tiles.records import Record, RecordTiles
from aatc_cli.runtime.kernels.tile_shape import TileSteps

Form = tuple[int, ...]
Numbers = npt.NDArray[np.int64]

# forms in one kernel: code of each takes some kilobytes and some tenths of a second of compiling
_MOST_FORMS = 24
# a bulk copy takes sixteen bytes at least
_LEAST_STAGE = 16
# bytes of a step of 32 digits of 16 tokens, by bits
_STEP_BYTES = tuple(64 * bits for bits in SIZES)
# what steps of keys of 4, 2 and 1 bits and those of values cost: rows of keys of four bits are sums of two
_COSTS = np.array([4, 2, 2, 1, 1, 1])
_FAR = 2**62


@dataclass(frozen=True)
class TileRoom:
    """What one kernel has room for: forms of classes, and the most bytes that a class of a head has in a tile."""

    steps: TileSteps
    stage_bytes: int

    @classmethod
    def of(cls, tiles: Sequence[RecordTiles]) -> TileRoom:
        """Enough for all of these layers."""
        sizes = [
            quota // ROWS * record.nbytes
            for part in tiles
            for row in part.records
            for record, quota in zip(row, part.rule.quotas, strict=True)
        ]
        return cls(steps_of(tiles), max(_LEAST_STAGE, *sizes))


def steps_of(tiles: Sequence[RecordTiles]) -> TileSteps:
    """Forms that hold all classes of these, few enough for one kernel, and what is read beyond records."""
    records = [record for part in tiles for row in part.records for record in row]
    found = _few(Counter(_steps(record) for record in records))
    keys, values = ((a, b, c) for a, b, c, *_ in found), ((a, b, c) for *_, a, b, c in found)
    steps = TileSteps(tuple(keys), tuple(values))
    return TileSteps(steps.keys, steps.values, max(0, *(_beyond(record, steps) for record in records)))


def form_of(record: Record, steps: TileSteps) -> int:
    """Which is the smallest of the forms of ``steps`` that hold a record."""
    mine, forms = _steps(record), [(*pair[0], *pair[1]) for pair in zip(steps.keys, steps.values, strict=True)]
    holding = [n for n, form in enumerate(forms) if all(most >= count for most, count in zip(form, mine, strict=True))]
    return min(holding, key=lambda n: (int(_COSTS @ np.array(forms[n])), forms[n]))


def _steps(record: Record) -> Form:
    return tuple(part.steps for side in SIDES for part in record.digits[side])


def _few(counts: Counter[Form]) -> tuple[Form, ...]:
    """At most `_MOST_FORMS` that hold all forms: the two whose classes lose least by it become one that holds both."""
    forms = np.array(sorted(counts))
    weights = np.array([counts[form] for form in sorted(counts)])
    left = np.ones(len(forms), dtype=bool)
    losses = np.stack([_losses(forms, weights, left, n) for n in range(len(forms))])
    while left.sum() > _MOST_FORMS:
        one, other = sorted(np.unravel_index(int(losses.argmin()), losses.shape))
        forms[one] = np.maximum(forms[one], forms[other])
        weights[one] += weights[other]
        left[other] = False
        losses[other], losses[:, other] = _FAR, _FAR
        losses[one] = losses[:, one] = _losses(forms, weights, left, int(one))
    return tuple(sorted({tuple(int(count) for count in form) for form in forms[left]}))


def _losses(forms: Numbers, weights: Numbers, left: npt.NDArray[np.bool_], n: int) -> Numbers:
    """What it costs all classes of form ``n`` and of each other that is left to have one that holds both."""
    both = np.maximum(forms, forms[n]) @ _COSTS
    costs = forms @ _COSTS
    found: Numbers = weights * (both - costs) + weights[n] * (both - costs[n])
    return np.where(left & (np.arange(len(forms)) != n), found, _FAR)


def _beyond(record: Record, steps: TileSteps) -> int:
    """Bytes beyond a record that code for its form reads."""
    form = form_of(record, steps)
    by_side: dict[Side, tuple[int, int, int]] = {"k": steps.keys[form], "v": steps.values[form]}
    ends = [
        start + size * count
        for side in SIDES
        for start, size, count in zip(record.starts[side], _STEP_BYTES, by_side[side], strict=True)
        if count
    ]
    return max(ends, default=0) - record.nbytes
