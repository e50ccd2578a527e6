"""Forms of classes: how many steps of 32 digits of each size they have. The kernel has straight code for every form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from aatc_cli.core import SIDES, Side
from aatc_cli.runtime.fused_tiles.digits import ROWS, SIZES
from aatc_cli.runtime.fused_tiles.records import Record, RecordTiles
from aatc_cli.runtime.kernels.decode_tiles import TileSteps

Form = tuple[int, int, int]

# forms of a side in one kernel: code of each takes some kilobytes and some tenths of a second of compiling
_MOST_FORMS = 16
# a bulk copy takes sixteen bytes at least
_LEAST_STAGE = 16
# bytes of a step of 32 digits of 16 tokens, by bits
_STEP_BYTES = tuple(64 * bits for bits in SIZES)


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
    found = {side: _few({_steps(record, side) for record in records}) for side in SIDES}
    beyond = max(_end(record, side, form_of(record, side, found[side])) for record in records for side in SIDES)
    return TileSteps(found["k"], found["v"], max(beyond, 0))


def form_of(record: Record, side: Side, forms: Sequence[Form]) -> Form:
    """The smallest of ``forms`` that holds a side of a record."""
    steps = _steps(record, side)
    return min((form for form in forms if _holds(form, steps)), key=lambda form: (_cost(form), form))


def _steps(record: Record, side: Side) -> Form:
    fours, twos, ones = (part.steps for part in record.digits[side])
    return fours, twos, ones


def _few(forms: set[Form]) -> tuple[Form, ...]:
    """At most `_MOST_FORMS` that hold all ``forms``: two that differ least become one that holds both."""
    while len(forms) > _MOST_FORMS:
        one, other = min(
            combinations(sorted(forms), 2), key=lambda pair: 2 * _cost(_both(*pair)) - _cost(pair[0]) - _cost(pair[1])
        )
        forms = forms - {one, other} | {_both(one, other)}
    return tuple(sorted(forms))


def _both(one: Form, other: Form) -> Form:
    fours, twos, ones = (max(pair) for pair in zip(one, other, strict=True))
    return fours, twos, ones


def _holds(form: Form, steps: Form) -> bool:
    return all(most >= count for most, count in zip(form, steps, strict=True))


def _cost(form: Form) -> int:
    """Products of a form: rows of digits of four bits are sums of two."""
    return form[0] + sum(form)


def _end(record: Record, side: Side, form: Form) -> int:
    """Bytes beyond a record that code for ``form`` reads."""
    ends = (
        start + size * steps for start, size, steps in zip(record.starts[side], _STEP_BYTES, form, strict=True) if steps
    )
    return max(ends, default=0) - record.nbytes
