"""What a call has to do, counted from widths, against counting it code by code in the order of the tiles."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.config import Geometry
from aatc_cli.core.tiles import BLOCK, TILE, _places, _planes
from aatc_cli.evals.bench.roofline import DeviceRates, Roofline, TileWork, plane_count
from aatc_cli.evals.bench.synthetic import random_tiles, synthetic_tables

KEYS = [(4, 3, 1), (8,), ()]
VALUES = [(2, 2), (7, 5, 1), (1,)]
FAST = 3


def registers(widths: tuple[int, ...], side: str) -> int:
    """Registers that hold a head's codes as bytes: codes of one word whose bit within their byte is the same."""
    count = 0
    for width in widths:
        for plane in _planes(width):
            word, shift = _places(side, plane)
            found = [(int(w), int(s) % 8 // plane) for w, s in zip(word, shift, strict=True)]
            assert all(found.count(place) == 4 for place in set(found))
            count += len(set(found))
    return count


def test_masks_are_the_registers_of_the_tile() -> None:
    expected = sum(registers(head, "k") for head in KEYS) + sum(registers(head, "v") for head in VALUES)
    assert TileWork.of_widths(KEYS, VALUES, FAST, True).masks == expected > 0


@pytest.mark.parametrize("by_planes", [True, False])
def test_multiply_adds_one_by_one(by_planes: bool) -> None:
    count = 0
    for head in KEYS:
        for width in head:
            factors = len(_planes(width)) if by_planes else 1
            for _token in range(TILE):
                for _channel in range(BLOCK):
                    # both members of a rotary pair are columns
                    count += factors * 2 * 8 * FAST
    assert TileWork.of_widths(KEYS, VALUES, FAST, by_planes).multiply_adds == count


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("bits", [0.5, 2.0, 3.0])
def test_bytes_are_those_of_the_tiles(bits: float, hopper: bool) -> None:
    geometry = Geometry(layers=1, heads=6, kv_heads=3, head_dim=64, hidden_size=384)
    tables = synthetic_tables(geometry, bits, 2, torch.device("cpu"), hopper=hopper)
    work = TileWork.of(tables)
    tiles = random_tiles(1, 5, tables, torch.Generator().manual_seed(0))
    assert work.bytes == tables.tile_bytes == tiles.nbytes // 5
    planes = sum(plane_count(width) for part in tables.keys for width in part.widths)
    blocks = sum(len(part.widths) for part in tables.keys)
    assert work.multiply_adds == 64 * 16 * (planes if hopper else blocks) * 16 * 2


def test_a_bound_is_work_over_rate() -> None:
    work = TileWork(bytes=1, masks=6, multiply_adds=20)
    found = Roofline.of(work, 10, 300, DeviceRates(bytes=100.0, instructions=4.0, multiply_adds=50.0))
    assert found == Roofline(bytes=3.0, unpack=15.0, keys=4.0)
