"""Packing is exact: every width, every length, equal codes back, and as many bytes as the byte law says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aatc_cli.core.pack_plan import pack_plan
from aatc_cli.core.packing import pack_keys, pack_values, unpack_keys, unpack_values
from aatc_cli.core.site_widths import PLANES, SiteWidths, plane_counts

WIDTHS = st.lists(st.integers(0, 16), min_size=1, max_size=40)


def random_codes(shape, bits, seed):
    """Codes over the whole signed range of every width, both ends included."""
    generator = torch.Generator().manual_seed(seed)
    widths = torch.tensor(bits)
    low = torch.where(widths > 0, -(2 ** (widths - 1).clamp_min(0)), torch.zeros_like(widths))
    span = 2**widths
    codes = low + (torch.rand(*shape, len(bits), generator=generator, dtype=torch.float64) * span).long()
    flat = codes.view(-1, len(bits))
    flat[0], flat[-1] = low, low + span - 1
    return codes.to(torch.int32)


def key_bytes_in_words(codes, bits):
    """Independent oracle for one token: the rules of docs/format.md, one bit at a time."""
    order = sorted((c for c in range(len(bits)) if bits[c]), key=lambda c: (-bits[c], c))
    row = bytearray()
    for plane in PLANES:
        fields = []
        for channel in order:
            if bits[channel] & plane:
                unsigned = int(codes[channel]) + 2 ** (bits[channel] - 1)
                below = sum(p for p in PLANES if p < plane and bits[channel] & p)
                fields.append(unsigned // 2**below % 2**plane)
        row += pack_in_words(fields, plane)
    return bytes(row)


def pack_in_words(fields, plane):
    if plane == 16:
        return b"".join(field.to_bytes(2, "little") for field in fields)
    size = -(-len(fields) * plane // 8)
    data = [0] * size
    for index, field in enumerate(fields):
        data[index % size] += field << (plane * (index // size))
    return bytes(data)


@settings(max_examples=150, deadline=None)
@given(bits=WIDTHS, tokens=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_keys_come_back_and_take_the_bytes_of_the_law(bits, tokens, seed):
    codes, plan = random_codes((2, tokens), bits, seed), pack_plan(bits, 16)
    data = pack_keys(codes, plan)
    assert data.dtype == torch.uint8
    assert data.shape == (2, tokens, plan.row_bytes)
    assert plan.row_bytes == SiteWidths.of(bits, 16).key_row_bytes
    assert torch.equal(unpack_keys(data, plan), codes[..., plan.order])
    assert bytes(data[1, 0].tolist()) == key_bytes_in_words(codes[1, 0], bits)


@settings(max_examples=150, deadline=None)
@given(bits=WIDTHS, flush=st.integers(1, 40), blocks=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_values_come_back_and_take_the_bytes_of_the_law(bits, flush, blocks, seed):
    codes, plan = random_codes((2, blocks, flush), bits, seed), pack_plan(bits, flush)
    data = pack_values(codes, plan)
    assert data.dtype == torch.uint8
    assert data.shape == (2, blocks, plan.block_bytes)
    assert plan.block_bytes == SiteWidths.of(bits, flush).value_block_bytes
    assert torch.equal(unpack_values(data, plan), codes[..., plan.order].transpose(-1, -2))
    # a value run is a key row turned by a quarter: fields of one channel, token after token
    at = 0
    for plane in PLANES:
        for channel in plan.order.tolist():
            if bits[channel] & plane:
                unsigned = codes[1, 0, :, channel].long() + 2 ** (bits[channel] - 1)
                below = bits[channel] % plane
                run = pack_in_words([int(u) // 2**below % 2**plane for u in unsigned], plane)
                assert bytes(data[1, 0, at : at + len(run)].tolist()) == run
                at += len(run)
    assert at == plan.block_bytes


@pytest.mark.parametrize("width", range(17))
def test_every_code_of_every_width(width):
    """All 2^b codes, in one channel and in a row of them, alone and beside other widths."""
    codes = torch.arange(-(2**width) // 2, 2**width // 2, dtype=torch.int32) if width else torch.zeros(4).int()
    for bits in ([width], [width] * 5, [16, width, 0, 3, width, 9, 1]):
        plan = pack_plan(bits, 16)
        table = torch.stack([codes if b == width else torch.zeros_like(codes) for b in bits], -1)
        assert torch.equal(unpack_keys(pack_keys(table, plan), plan), table[:, plan.order])
        padded = torch.nn.functional.pad(table, (0, 0, 0, -len(codes) % 16))
        blocks = padded.view(-1, 16, len(bits))
        back = unpack_values(pack_values(blocks, plan), plan)
        assert torch.equal(back, blocks[..., plan.order].transpose(-1, -2))


def test_channels_without_bits_take_no_bytes():
    plan = pack_plan([0, 0, 0], 16)
    codes = torch.zeros(2, 16, 3, dtype=torch.int32)
    assert pack_keys(codes, plan).shape == (2, 16, 0)
    assert pack_values(codes, plan).shape == (2, 0)
    assert unpack_keys(pack_keys(codes, plan), plan).shape == (2, 16, 0)
    assert unpack_values(pack_values(codes, plan), plan).shape == (2, 0, 16)


def test_channels_are_sorted_by_width_and_planes_are_dense():
    bits = [2, 0, 5, 2, 16, 5, 1]
    plan = pack_plan(bits, 16)
    assert plan.order.tolist() == [4, 2, 5, 0, 3, 6]
    assert [(run.width, run.start, run.stop) for run in plan.classes] == [(16, 0, 1), (5, 1, 3), (2, 3, 5), (1, 5, 6)]
    assert {plane: plan.count(plane) for plane in PLANES} == plane_counts(bits)


def test_unpacked_floats_are_the_integers():
    bits = list(range(17))
    codes, plan = random_codes((3, 16), bits, 0), pack_plan(bits, 16)
    assert torch.equal(unpack_keys(pack_keys(codes, plan), plan, torch.float32), codes[..., plan.order].float())
    back = unpack_values(pack_values(codes, plan), plan, torch.float64)
    assert torch.equal(back, codes[..., plan.order].transpose(-1, -2).double())


def test_a_flipped_bit_changes_one_code():
    bits = [3, 6, 0, 12, 1, 8]
    codes, plan = random_codes((5,), bits, 1), pack_plan(bits, 16)
    data = pack_keys(codes, plan)
    for place in range(plan.row_bytes):
        damaged = data.clone()
        damaged[2, place] ^= 1
        assert (unpack_keys(damaged, plan) != codes[..., plan.order]).sum() == 1


def test_the_documented_example():
    row = pack_keys(torch.tensor([-1, 0, 1], dtype=torch.int32), pack_plan([3, 0, 2], 16))
    assert bytes(row.tolist()).hex(" ") == "0d 01"
