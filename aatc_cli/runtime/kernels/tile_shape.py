"""What a launch of the kernel of tiles is made for: its warps, shared memory, programs, and forms of classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

_LOG2E = 1.4426950408889634
# shared memory of a multiprocessor less what a program takes of it besides, a flag of its own included
SHARED_OF_PROGRAM = 233_472 - 1_152
# programs of a head of one sequence: their parts are merged by one of them
_MOST_PARTS = 1024
# what starting and ending a program costs, in tiles
_START = 24
# what programs of exact tokens cost, in tiles
_LATE = 50
# tiles of a program at most: sequences may be of several lengths
_MOST_TILES = 512
# tiles that share a turned query, and those of a warp that are under way
_SPAN, _MOST_PLACES = 2, 4


class Launch(NamedTuple):
    """Warps of a program; tiles of a warp that there is shared memory for; records that it goes through at once.

    places: the next tile comes while one is read, if there are two. near_turns: whether turns of places are in shared
    memory, for which wide heads of many bits have no room.
    """

    warps: int
    places: int
    records: int
    near_turns: bool


_LAUNCHES = (
    Launch(16, 2, 1, True),
    *(Launch(12, places, 2, True) for places in (4, 3, 2)),
    *(Launch(warps, 2, 1, True) for warps in (12, 8, 4)),
    *(Launch(4, 1, 1, near) for near in (True, False)),
)
# registers of a warp's lane up to which it goes through two records: above, it would keep sums in memory
_PAIR_REGISTERS = 180


@dataclass(frozen=True)
class TileSteps:
    """Forms that classes have, and bytes beyond a record that are read where digits do not fill theirs.

    A form is how many steps of 32 digits of 4, 2 and 1 bits there are, of keys and, at the same place, of values; the
    kernel has a walk over tiles for each.
    """

    keys: tuple[tuple[int, int, int], ...]
    values: tuple[tuple[int, int, int], ...]
    beyond: int = 256

    @property
    def matrix(self) -> int:
        """Most steps of the matrix of keys: rows of four bits are sums of two."""
        return max(form[0] + sum(form) for form in self.keys)

    @property
    def sums(self) -> int:
        """Most steps of values."""
        return max(sum(form) for form in self.values)


@dataclass(frozen=True)
class TileShape:
    """What a launch is made for; lengths on the device may be anything up to ``max_tiles``.

    group: query heads of a kv head; classes of a kv head; lags: first and last distance of queries that count for what
    tokens receive; fast: lots of pairs that turn far (`angles.fast_lots`); steps, and bytes of a class's records in a
    tile, as of the tables.
    """

    batch: int
    kv_heads: int
    group: int
    classes: int
    dim: int
    slots: int
    sinks: int
    max_tiles: int
    tile_bytes: int
    fast: int
    steps: TileSteps
    stage_bytes: int
    biased: bool
    lags: tuple[int, int]
    scaling: float

    @property
    def warps(self) -> int:
        """Warps of a program: four of them multiply together, all share its tables."""
        return self._launch.warps

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return 32 * self.warps

    @property
    def sets(self) -> int:
        """Sums of values of a step that are kept apart: two blocks share them where queries leave columns free."""
        return 1 if self.group <= 4 else 2 * -(-self.group // 8)

    @cached_property
    def _launch(self) -> Launch:
        """Sixteen warps with one record each, twelve with two, or what there are registers and shared memory for."""
        lots = self.dim // 16
        # sums of values, operands, turned queries and what else there is; then the sums of keys of a record
        registers = 4 * self.sets * self.steps.sums + 48 + (2 * lots if self.group <= 4 else 0)
        most = 16 if registers + 4 * lots <= 144 else 12 if registers + 4 * lots <= 190 else 8
        for found in _LAUNCHES:
            held = registers + 8 * lots <= _PAIR_REGISTERS if found.records > 1 else found.warps <= most
            room = SHARED_OF_PROGRAM - _barrier_bytes(found.warps)
            if held and max(self._walk_bytes(found), self._merge_bytes(found.warps)) <= room:
                return found
        return _LAUNCHES[-1]

    def chunk(self, processors: int) -> int:
        """Tiles of a program, whole spans: such that rounds of programs over the device are done soonest.

        A program costs as much as `_START` tiles beside its own, and those of exact tokens, which come last, `_LATE`
        where the last round leaves too little of the device to them; at most `_MOST_PARTS` share a head.
        """
        heads = self.batch * self.kv_heads

        def cost(chunk: int) -> int:
            walking = heads * self.classes * -(-self.max_tiles // chunk)
            rounds = -(-walking // processors)
            late = rounds * processors - walking < heads * self.exact
            return rounds * (chunk + _START) + _LATE * late

        least = -(-self.max_tiles * self.classes // (_MOST_PARTS - self.exact))
        most = max(least, min(self.max_tiles, _MOST_TILES), self._least_chunk)
        choices = range(-(-max(least, self._least_chunk) // _SPAN) * _SPAN, most + _SPAN, _SPAN)
        return min(choices, key=lambda chunk: (cost(chunk), -chunk))

    @property
    def _least_chunk(self) -> int:
        """Tiles with which half of the warps of a program have something to do."""
        return _SPAN * self.warps // 2

    @property
    def exact(self) -> int:
        """Programs of a head's sinks and window: several where few sequences leave the device idle."""
        return 4 if self.batch * self.kv_heads < 64 else 1

    def shared_bytes(self, parts: int) -> int:
        """Shared bytes of a program, as the kernel lays them out, with ``parts`` programs of a head."""
        walk, merge = self._walk_bytes(self._launch), self._merge_bytes(self.warps)
        wide = 2 * self.threads // self.dim
        exact = ((1 + wide) * self.dim + 2 + self.slots) * self.group * 4
        last = ((2 + wide) * self.dim + 3 + parts) * self.group * 4
        return _barrier_bytes(self.warps) + max(walk, merge, exact, last)

    def _walk_bytes(self, launch: Launch) -> int:
        """Shared bytes of a program that walks tiles, beside those of its barriers."""
        lots = self.dim // 16
        operands = lots if self.group <= 4 else -(-self.group // 8) * (2 * lots - self.fast)
        walk = self.steps.matrix * self.dim * 32 + 256 * operands
        walk += 64 * _SPAN * -(-self.fast // 2) * 64 if launch.near_turns else 0
        walk += 1024 + self.dim * 2
        walk += 256 * launch.warps * operands if self.group > 4 else 0
        # words of digits that are not there are read too
        return walk + launch.warps * (launch.places * self.stage_bytes + 2 * lots * 32) + self.steps.beyond

    def _merge_bytes(self, warps: int) -> int:
        """Shared bytes of what the warps of a program have summed."""
        return (warps * self.group * (32 * self.steps.sums + 11) + self.group) * 4

    def defines(self, element: int) -> tuple[tuple[str, int | str], ...]:
        """What the kernel is compiled with for tensors of this element type."""
        return (
            ("D", self.dim),
            ("G", self.group),
            ("NW", self.warps),
            ("PLACES", self._launch.places),
            ("RECORDS", self._launch.records),
            ("NEAR_TURNS", int(self._launch.near_turns)),
            ("FAST", self.fast),
            ("KEY_FORMS", _numbered(self.steps.keys)),
            ("VALUE_FORMS", _numbered(self.steps.values)),
            ("KM", self.steps.matrix),
            ("VS", self.steps.sums),
            ("QTYPE", element),
            ("BIAS", int(self.biased)),
        )

    def numbers(self, chunk: int) -> tuple[Any, ...]:
        """The scalars that come first in the kernel's signature."""
        whole = (
            self.kv_heads,
            self.classes,
            chunk,
            self.exact,
            self.slots,
            self.sinks,
            self.slots - self.sinks,
            self.tile_bytes,
            self.max_tiles,
            self.stage_bytes,
            *self.lags,
        )
        return *(np.int32(value) for value in whole), np.float32(self.scaling * _LOG2E)

    def parts(self, chunk: int) -> int:
        """Programs of a head of one sequence."""
        return self.exact + self.classes * -(-self.max_tiles // chunk)


def _barrier_bytes(warps: int) -> int:
    """Shared bytes of barriers, which nothing else may lie over."""
    return -(-(_MOST_PLACES * warps + 2) * 8 // 128) * 128


def _numbered(forms: Sequence[tuple[int, int, int]]) -> str:
    """Forms as the kernel writes them."""
    return ",".join(str((fours * 64 + twos) * 64 + ones) for fours, twos, ones in forms)
