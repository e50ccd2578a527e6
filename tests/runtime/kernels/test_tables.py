"""The order of registers, by emulating the matrix instructions as their specification gives them: lane by lane.

m16n8k32 (integers): lane 4 g + t holds A[g, 4 t ..], A[g + 8, 4 t ..], A[g, 16 + 4 t ..], A[g + 8, 16 + 4 t ..] and
B[4 t .., g], B[16 + 4 t .., g]; m16n8k16 (float16) the same with pairs 2 t, 2 t + 1 and 8 + 2 t, 9 + 2 t.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.core import Side
from aatc_cli.core.tiles import block_bytes, block_places, pack_block
from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.angles import row_angles, span_angles, tile_angles
from aatc_cli.runtime.kernels.integer_keys import MAGIC, IntegerKeys
from aatc_cli.runtime.kernels.planes import KeyPlanes
from aatc_cli.runtime.kernels.tables import HeadSide, LayerTables, fast_pairs

DIM = 64
WIDTHS = (3, 2, 1)


def side(seed: int, widths: tuple[int, ...] = WIDTHS) -> HeadSide:
    generator = torch.Generator().manual_seed(seed)
    count = 16 * len(widths)
    each = torch.tensor(widths).repeat_interleave(16)
    rows = torch.randn(count, DIM, generator=generator)
    return HeadSide(torch.randperm(count, generator=generator), widths, rows, (2.0**each - 1) / 2)


def tables(fast: int) -> LayerTables:
    return LayerTables.of([side(0), side(1)], [side(2), side(3)], DIM, fast)


def integer(fast: int) -> IntegerKeys:
    found = tables(fast).key
    assert isinstance(found, IntegerKeys)
    return found


def lanes() -> list[tuple[int, int, int]]:
    return [(4 * g + t, g, t) for g in range(8) for t in range(4)]


def key_rows(data: np.ndarray, width: int, lane: int) -> list[np.ndarray]:
    """What the kernel makes of one block: 8 rows of 4 bytes, planes of two bits first."""
    words, rows = data.view(np.uint32), [np.zeros(4, np.int64) for _ in range(8)]
    left, at = width, 0
    while left:
        plane = 2 if left >= 2 else 1
        for r in range(8):
            share = 8 // plane
            word = int(words[at + lane + 32 * (r // share)]) >> (plane * (r % share))
            field = np.array([(word >> (8 * b)) & ((1 << plane) - 1) for b in range(4)])
            rows[r] = (rows[r] << plane) + field
        at, left = at + 32 * plane, left - plane
    return rows


def test_integer_product_reconstructs_keys() -> None:
    found, part = integer(DIM // 16), side(0)
    generator = torch.Generator().manual_seed(9)
    codes = torch.cat([torch.randint(0, 2**w, (64, 16), generator=generator) for w in WIDTHS], 1)
    packed = [pack_block(codes[:, 16 * i : 16 * i + 16], w, "k").numpy() for i, w in enumerate(WIDTHS)]
    rows = [[key_rows(data, w, lane) for lane in range(32)] for data, w in zip(packed, WIDTHS, strict=True)]
    rows.append([[np.zeros(4, np.int64)] * 8 for _ in range(32)])
    matrix = found.matrix[0].numpy()
    got = np.zeros((64, DIM), np.int64)
    for m in range(4):
        for j in range(DIM // 16):
            for half in range(2):
                total = np.zeros((16, 8), np.int64)
                for k in range(DIM // 32):
                    a, b = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
                    for lane, g, t in lanes():
                        for upper in range(2):
                            block = rows[2 * k + upper][lane]
                            a[g, 16 * upper + 4 * t :][:4], a[g + 8, 16 * upper + 4 * t :][:4] = (
                                block[2 * m],
                                block[2 * m + 1],
                            )
                            b[16 * upper + 4 * t :][:4, g] = matrix[j, k, lane, 8 * half + 4 * upper :][:4]
                    total += a @ b
                for _, g, t in lanes():
                    start = found.start[0, j, t, half].numpy() - MAGIC
                    assert (start[:2] == start[2:]).all()
                    column = DIM // 2 * half + 8 * j + 2 * t
                    for e in range(2):
                        got[8 * g + 2 * m, column + e] = total[g, 2 * t + e] + start[e]
                        got[8 * g + 2 * m + 1, column + e] = total[g + 8, 2 * t + e] + start[e]
    scale = found.pair_scale[0].double().repeat(2) / 64
    exact = (codes.double() - part.offset.double()) @ part.rows.double()
    # every row of the matrix is rounded to half a step, and the start to half a step
    bound = (codes.double().sum(1, keepdim=True) * 0.5 + part.offset.sum() * 0.5 + 0.5) * scale
    error = torch.from_numpy(got).double() * scale - exact
    assert bool((error.abs() <= bound).all())
    assert float(error.abs().max()) > 0
    held = IntegerKeys.rounded(part.rows, WIDTHS, DIM, DIM // 16) / scale
    assert torch.allclose(held, (part.rows.double() / scale).round(), atol=1e-4)
    integers = held.round()
    expected = codes.double() @ integers - (part.offset.double() @ integers).round()
    assert float((torch.from_numpy(got).double() - expected).abs().max()) <= 1


def operands_of(record: np.ndarray, at: int, bits: int, lane: int, m: int) -> list[np.ndarray]:
    """The kernel's read of rows 2 m and 2 m + 1 of a plane, as the bytes that are multiplied: the second four times."""
    words = record[at:].view(np.uint32)
    if bits == 2:
        word = int(words[lane + 32 * (m // 2)]) >> (4 * (m % 2))
        masked = [word & 0x03030303, word & 0x0C0C0C0C]
    else:
        word = int(words[lane])
        masked = [word >> (2 * m) & 0x01010101, (word << 1 if m == 0 else word >> (2 * m - 1)) & 0x04040404]
    return [np.array([one], np.uint32).view(np.uint8) for one in masked]


def record_of(codes: torch.Tensor, widths: tuple[int, ...], which: Side) -> np.ndarray:
    """Codes [64, A] of one side of a head as they lie in its record."""
    record = torch.zeros(sum(map(block_bytes, widths)), dtype=torch.uint8)
    for i, (width, places) in enumerate(zip(widths, block_places(widths, which), strict=True)):
        record[places] = pack_block(codes[:, 16 * i : 16 * i + 16], width, which)
    return record.numpy()


@pytest.mark.parametrize("widths", [(3, 2, 1), (8, 5), (4, 4, 1)])
def test_planes_as_floats_reconstruct_keys(widths: tuple[int, ...]) -> None:
    """Codes as e4m3 bytes times the cores in the order of the descriptor, as the instruction is specified."""
    fast, part = 2, side(0, widths)
    found = LayerTables.of([part], [side(2)], DIM, fast, hopper=True).key
    assert isinstance(found, KeyPlanes)
    generator = torch.Generator().manual_seed(9)
    codes = torch.cat([torch.randint(0, 2**w, (64, 16), generator=generator) for w in widths], 1)
    record = record_of(codes, widths, "k")
    memory = found.cores[0].flatten()
    got = torch.zeros(64, DIM, dtype=torch.float64)
    for m in range(4):
        total = torch.zeros(16, 16 * fast, dtype=torch.float64)
        for step in range(found.steps):
            a, b = torch.zeros(16, 32, dtype=torch.uint8), torch.zeros(32, 16 * fast, dtype=torch.uint8)
            for half in range(2):
                at, bits = found.planes[0, 2 * step + half, :2].tolist()
                if step == half == 0:
                    # the plane of the offsets is one everywhere: 16 units, and 64 for odd rows
                    a[:8, :16], a[8:, :16] = 0x10, 0x20
                for lane, g, t in lanes() if bits else []:
                    for upper, row in enumerate(operands_of(record, at, bits, lane, m)):
                        a[g + 8 * upper, 16 * half + 4 * t :][:4] = torch.from_numpy(row.copy())
            # lots of 8 columns are 256 bytes apart, halves of the channels 128, columns 16
            for column in range(16 * fast):
                for channel in range(32):
                    place = 512 * fast * step + 256 * (column // 8) + 128 * (channel // 16) + 16 * (column % 8)
                    b[channel, column] = memory[place + channel % 16]
            as_floats = [x.view(torch.float8_e4m3fn).to(torch.float64) for x in (a, b)]
            total += as_floats[0] @ as_floats[1]
        for lot in range(2 * fast):
            column = 8 * (lot // 2) + DIM // 2 * (lot % 2)
            for g in range(8):
                for upper in range(2):
                    values = total[g + 8 * upper, 8 * lot : 8 * lot + 8] / 4**upper
                    got[8 * g + 2 * m + upper, column : column + 8] = values
    scale = found.pair_scale[0].double().repeat(2)
    held = KeyPlanes.rounded(part.rows, widths, DIM, fast)
    expected = (codes.double() - part.offset.double()) @ held
    columns = [c for c in range(DIM) if c % (DIM // 2) < 8 * fast]
    error = (got * scale - expected)[:, columns]
    # sixteen digits leave half the least e4m3 number of the offsets, sixteen times; where more than two planes share a
    # scale, the last ones may hold small rows to half the least number
    wide = torch.tensor([width > 4 for width in widths]).repeat_interleave(16)
    steps = 16 + ((codes.double() - part.offset.double()).abs() * wide).sum(1, keepdim=True)
    assert bool((error.abs() <= steps * 2.0**-19 * scale[columns]).all())
    off = (held - part.rows.double())[:, columns]
    assert 0 < float(off.abs().max()) <= 2**-4 * float(part.rows.abs().max())
    assert float(off.square().mean().sqrt() / part.rows.square().mean().sqrt()) < 0.04


def test_planes_of_a_head_and_the_row_of_its_offsets() -> None:
    fast, part = 2, side(0, (5, 3))
    found = LayerTables.of([part], [side(2)], DIM, fast, hopper=True).key
    assert isinstance(found, KeyPlanes)
    table = found.planes[0]
    weights = table[:, 3].contiguous().view(torch.float32)
    assert table[:, :3].tolist() == [[0, 0, 4], [0, 2, 0], [256, 2, 0], [512, 2, 1], [768, 1, 0], [896, 1, 1]]
    assert weights[1:].tolist() == [8, 2, 2, 1, 1]
    slow_columns = [c for c in range(DIM) if c % (DIM // 2) >= 8 * fast]
    total = part.offset.double() @ part.rows.double()
    largest = float(found.pair_scale[0, -1])
    for lane, _, t in lanes():
        for register in range(4):
            for e in range(2):
                for step in range(DIM // 16 - fast):
                    dim = 8 * (fast + step) + 2 * t + e + DIM // 2 * (register // 2)
                    value = 16 * float(found.slow[0, -1, step, lane, 2 * register + e]) * largest
                    assert value == pytest.approx(-float(total[dim]), abs=16 * largest * 2**-11)
    rows = part.rows.double()[:, slow_columns].norm(dim=1) * torch.tensor([8.0, 2.0]).repeat_interleave(16)
    longest = max(float(rows.max()), float(total[slow_columns].norm()) / 16)
    assert float(found.norm[0]) * largest == pytest.approx(longest, rel=1e-5)


@pytest.mark.parametrize(("bits", "place"), [(2, 0), (1, 0), (1, 1)])
def test_value_bytes_are_codes_of_the_weights_tokens(bits: int, place: int) -> None:
    """Operands of step n of a plane: rows g and g + 8, the latter four times, of the tokens the weights are of."""
    codes = torch.randint(0, 2**bits, (64, 16), generator=torch.Generator().manual_seed(3))
    words = pack_block(codes, bits, "v").numpy().view(np.uint32)
    mask = (3 if bits == 2 else 1) * 0x01010101 << place
    shifts = {(2, 0): (0, 4), (1, 0): (0, 4, 1, 5), (1, 1): (-1, 3, 0, 4)}[bits, place]
    for lane, g, t in lanes():
        for n in range(4):
            word = int(words[2 * lane + n // 2] if bits == 2 else words[lane])
            by = shifts[n % 2] if bits == 2 else shifts[n]
            moved = (word << -by if by < 0 else word >> by) & 0xFFFFFFFF
            for upper in range(2):
                held = moved & (mask << (2 * upper))
                for byte in range(4):
                    token = 8 * (2 * t + byte // 2) + 2 * n + byte % 2
                    expected = int(codes[token, g + 8 * upper]) << (place + 2 * upper)
                    assert held >> (8 * byte) & 255 == expected


def test_slow_rows_are_the_first_operand_of_the_absorbing_product() -> None:
    fast = 2
    found, part = integer(fast), side(0)
    slow = found.slow[0].float().numpy()
    largest = float(found.pair_scale[0, -1])
    padded = torch.zeros(DIM, DIM)
    padded[: part.rows.shape[0]] = part.rows
    for block in range(DIM // 16):
        for step in range(DIM // 16 - fast):
            for lane, g, t in lanes():
                for register in range(4):
                    row = g + 8 * (register % 2)
                    channel = 16 * block + 4 * (row % 8 // 2) + row % 2 + 2 * (row // 8)
                    for e in range(2):
                        dim = 8 * (fast + step) + 2 * t + e + DIM // 2 * (register // 2)
                        value = slow[block, step, lane, 2 * register + e] * largest
                        assert value == pytest.approx(float(padded[channel, dim]), abs=largest * 2**-11)


def test_offsets_as_bytes() -> None:
    found, part = integer(2), side(0)
    assert found.halves == 1
    codes = found.code_offsets[0].contiguous().view(torch.uint8).flatten()
    assert torch.equal(codes[:48].float(), 2 * part.offset)
    assert not codes[48:].any()


def test_value_matrix_undoes_the_planes() -> None:
    """The kernel sums u / 2^(width - 2), four times that in the upper half of a block; the decode rows undo both."""
    found, part = tables(2), side(2)
    unit = torch.tensor([2.0, 1.0, 1.0]).repeat_interleave(16) * torch.tensor([1.0, 0.25]).repeat_interleave(8).repeat(
        3
    )
    assert torch.allclose(found.decode[0, :48].float(), part.rows * unit[:, None], rtol=1e-3, atol=1e-6)
    u = torch.randint(0, 2, (48,)).float()
    exact = (u - part.offset) @ part.rows
    assert torch.allclose((u / unit) @ found.decode[0, :48].float() - found.value_offset[0], exact, atol=2e-2)


def test_angles_in_lane_order() -> None:
    frequencies = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    rows, starts = row_angles(frequencies, 2), tile_angles(frequencies, 4, 3)
    for lane, g, t in lanes():
        for m in range(4):
            for h in range(2):
                for e in range(2):
                    angle = (8 * g + 2 * m + h) * frequencies[8 + 2 * t + e]
                    assert float(rows[m, h, 1, lane, e]) == pytest.approx(float(angle.cos()), abs=1e-3)
                    assert float(rows[m, h, 1, lane, 2 + e]) == pytest.approx(float(angle.sin()), abs=1e-3)
        assert float(starts[2, 1, t, 3]) == pytest.approx(float((132 * frequencies[8 + 2 * t + 1]).sin()), abs=1e-6)


def test_angles_of_a_span() -> None:
    frequencies = 1e4 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    found = span_angles(frequencies, 2)
    for lane, g, t in lanes():
        for tile in range(4):
            for m in range(4):
                for e in range(2):
                    angle = (64 * tile + 8 * g + 2 * m) * frequencies[8 + 2 * t + e]
                    assert float(found[tile, m, 1, lane, e]) == pytest.approx(float(angle.cos()), abs=1e-3)
                    assert float(found[tile, m, 1, lane, 2 + e]) == pytest.approx(float(angle.sin()), abs=1e-3)


def test_fast_pairs_turn_more_than_a_tenth_of_a_radian_in_a_tile() -> None:
    def count(theta: float, dim: int) -> int:
        return fast_pairs(theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim))

    assert [count(5e5, 128), count(1e6, 128), count(1e4, 64), count(1e4, 128)] == [4, 4, 3, 6]


def test_tables_need_blocks_of_one_width() -> None:
    from aatc_cli.core.codec import TransformCodec

    eye, ones = torch.eye(DIM)[None], torch.ones(DIM)
    bits = torch.tensor([2] * 15 + [1] * 17 + [0] * 32)
    with pytest.raises(AatcError, match="blocks of 16"):
        HeadSide.of(TransformCodec(eye, eye, ones, bits, ones), 0)
