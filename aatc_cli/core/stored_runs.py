"""Runs of a layer's codes in a stored chunk, and the bits of them that no entropy code takes.

A run is the channels of one resolution of one unit in one class. The lowest bits of fine resolutions are evenly spread,
so that they are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aatc_cli.core.cell_code import CellCode
from aatc_cli.core.stepped_tables import WIDEST, plain_bits
from aatc_cli.core.stored_layer import StoredLayer

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Channels of one resolution of one unit in one class. place: which of the coded units and classes it is.

    order: whose ranks its tokens lie by. columns: of the 2 C numbers of a layer.
    """

    place: int
    order: int
    k: int
    width: int
    columns: Ints


def runs_of(layer: StoredLayer, orders: int) -> Iterator[Run]:
    """Runs of a layer, resolutions rising, units and classes in their order in each."""
    found, place = [], 0
    for unit, code in zip(layer.units, layer.codes, strict=True):
        assert isinstance(code, CellCode)
        for k, bits in enumerate(code.bits.cpu().numpy()):
            if not bits.any():
                continue
            for width in sorted(set(bits.tolist()) - {0}):
                columns = unit.columns.start + np.flatnonzero(bits == width)
                found.append(Run(place, unit.group if orders > 1 else 0, k, width, columns))
            place += 1
    yield from sorted(found, key=lambda run: (run.width, run.place))


PLAIN: Ints = np.array([0, *(plain_bits(width) for width in range(1, WIDEST + 1))], dtype=np.int64)


def packed_plain(low: Ints, bits: Ints) -> bytes:
    """Numbers of ``bits`` bits each, the lowest first."""
    held, wide = low[bits > 0], bits[bits > 0]
    if not held.size:
        return b""
    places = np.arange(int(wide.max()))
    every = ((held[:, None] >> places) & 1)[places < wide[:, None]]
    return np.packbits(every.astype(np.uint8), bitorder="little").tobytes()


def unpacked_plain(data: bytes, bits: Ints) -> NDArray[np.uint8]:
    """Inverse of `packed_plain`."""
    wide = bits[bits > 0]
    if not wide.size:
        return np.zeros(0, dtype=np.uint8)
    every = np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=int(wide.sum()), bitorder="little")
    places = np.arange(int(wide.max()))
    held = np.zeros((wide.size, places.size), dtype=np.uint8)
    held[places < wide[:, None]] = every
    found: NDArray[np.uint8] = (held << places.astype(np.uint8)).sum(1).astype(np.uint8)
    return found
