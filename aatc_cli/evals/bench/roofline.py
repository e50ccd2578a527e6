"""What one call of the fused attention has to do, counted from a layer's tables, and the least time each part takes.

Three parts, each alone and as if the others cost nothing: bytes read, code bits masked into operands, and multiply-adds
with the key matrix. No kernel of this layout is faster than the slowest of the three; docs/kernels.md has the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aatc_cli.core.tiles import BLOCK, SCALE_BYTES, TILE, block_bytes
from aatc_cli.runtime.kernels.integer_keys import IntegerKeys
from aatc_cli.runtime.kernels.tables import LayerTables

# codes of a plane that one mask turns into the bytes of a register
_PER_MASK = 4
# columns that a lot of 8 rotary pairs has in the key matrix
_LOT = 16


@dataclass(frozen=True)
class TileWork:
    """Work of 64 tokens of all heads of one layer.

    bytes: codes and token scales; masks: integer instructions of one thread; multiply_adds: with the key matrix, in the
    columns of fast pairs only.
    """

    bytes: int
    masks: int
    multiply_adds: int

    @classmethod
    def of(cls, tables: LayerTables) -> TileWork:
        """From the widths of a layer's blocks."""
        keys = [part.widths for part in tables.keys]
        by_planes = not isinstance(tables.key, IntegerKeys)
        return cls.of_widths(keys, [part.widths for part in tables.values], tables.fast, by_planes)

    @classmethod
    def of_widths(
        cls, keys: Sequence[tuple[int, ...]], values: Sequence[tuple[int, ...]], fast: int, by_planes: bool
    ) -> TileWork:
        """From every head's widths of blocks of 16 channels, and how many lots of 8 pairs are fast.

        by_planes: every plane of code bits is a factor of its own, as on Hopper; else codes are put together first.
        """
        key_planes = sum(plane_count(width) for head in keys for width in head)
        value_planes = sum(plane_count(width) for head in values for width in head)
        rows = BLOCK * (key_planes if by_planes else sum(width > 0 for head in keys for width in head))
        codes = sum(block_bytes(width) for side in (keys, values) for head in side for width in head)
        return cls(
            bytes=codes + SCALE_BYTES * len(keys),
            masks=TILE * BLOCK // _PER_MASK * (key_planes + value_planes),
            multiply_adds=TILE * rows * fast * _LOT,
        )


def plane_count(width: int) -> int:
    """Planes of a width: as many of two bits as fit, and one of one bit where it is odd."""
    return width // 2 + width % 2


@dataclass(frozen=True)
class DeviceRates:
    """Measured in this process: bytes read, integer instructions of a thread, and e4m3 multiply-adds, per second."""

    bytes: float
    instructions: float
    multiply_adds: float


@dataclass(frozen=True)
class Roofline:
    """Seconds that bytes, masks and multiply-adds take at the rates of a device, each alone."""

    bytes: float
    unpack: float
    keys: float

    @classmethod
    def of(cls, work: TileWork, tiles: int, bytes_moved: int, rates: DeviceRates) -> Roofline:
        """Of ``tiles`` tiles of all sequences; bytes_moved: the whole cache, sinks and window included."""
        return cls(
            bytes_moved / rates.bytes,
            tiles * work.masks / rates.instructions,
            tiles * work.multiply_adds / rates.multiply_adds,
        )
