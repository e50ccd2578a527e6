"""Tiles: packing is inverse to unpacking at every width, takes the bytes it says, and lies as a lane reads it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.core import Side
from aatc_cli.core.tiles import (
    BLOCK,
    MAX_WIDTH,
    TILE,
    block_bytes,
    block_places,
    pack_block,
    plane_starts,
    unpack_block,
)


@settings(max_examples=60, deadline=None)
@given(width=st.integers(0, MAX_WIDTH), side=st.sampled_from(["k", "v"]), seed=st.integers(0, 2**31))
def test_unpacking_is_inverse_to_packing(width: int, side: str, seed: int) -> None:
    codes = torch.randint(0, 2**width, (2, TILE, BLOCK), generator=torch.Generator().manual_seed(seed))
    data = pack_block(codes, width, side)
    assert data.shape == (2, block_bytes(width))
    assert torch.equal(unpack_block(data, width, side), codes)


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("width", range(1, MAX_WIDTH + 1))
def test_every_bit_of_a_block_belongs_to_one_code(side: str, width: int) -> None:
    ones = pack_block(torch.full((TILE, BLOCK), 2**width - 1), width, side)
    assert bool((ones == 255).all())
    single = torch.zeros(TILE, BLOCK, dtype=torch.int64)
    single[37, 11] = 2**width - 1
    counts = [bin(byte).count("1") for byte in pack_block(single, width, side).tolist()]
    assert sum(counts) == width


def test_key_words_hold_eight_tokens_of_four_channels() -> None:
    """Lane 4 g + t, plane of one bit: byte b is channel 4 t + b, bit r is token 8 g + r."""
    codes = torch.zeros(TILE, BLOCK, dtype=torch.int64)
    codes[8 * 5 + 3, 4 * 2 + 1] = 1
    words = pack_block(codes, 1, "k").view(torch.int32)
    assert words.nonzero().flatten().tolist() == [4 * 5 + 2]
    assert int(words[22]) == 1 << (8 * 1 + 3)


def test_value_words_hold_both_halves_of_a_block_in_a_byte() -> None:
    """Plane of two bits: word 2 lane + n / 2, byte 2 h + e of token 8 (2 t + h) + 2 n + e, bit 4 (n % 2) + 2 upper."""
    codes = torch.zeros(TILE, BLOCK, dtype=torch.int64)
    codes[8 * (2 * 3 + 1) + 2 * 2 + 1, 8 + 6] = 3
    words = pack_block(codes, 2, "v").view(torch.int32)
    assert words.nonzero().flatten().tolist() == [2 * (4 * 6 + 3) + 1]
    assert int(words.view(torch.uint8)[4 * 55 + 3]) == 3 << 2


def test_planes_lie_by_bits_or_by_rank() -> None:
    assert plane_starts((5, 3, 1), "k") == [[0, 256, 768], [512, 896], [1024]]
    assert plane_starts((5, 3, 1), "v") == [[0, 640, 1024], [256, 896], [512]]


@pytest.mark.parametrize("side", ["k", "v"])
def test_places_of_blocks_are_all_bytes_of_their_side_once(side: Side) -> None:
    widths = (8, 7, 5, 4, 3, 2, 1, 1)
    places = block_places(widths, side)
    assert [place.numel() for place in places] == [block_bytes(width) for width in widths]
    assert torch.cat(places).sort().values.tolist() == list(range(sum(map(block_bytes, widths))))
