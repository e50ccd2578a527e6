"""What a launch of the decode kernels is made for: programs, shared memory, shares of exact tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from aatc_cli.core.tiles import SCALE_BYTES, block_bytes
from aatc_cli.runtime.kernels import launch
from aatc_cli.runtime.kernels.decode import DecodeShape, Tuning
from aatc_cli.runtime.kernels.planes import KeyPlanes

# a multiprocessor of Hopper, less what the system takes of it
SHARED, PROCESSORS = 228 * 1024 - 4096, 132
LLAMA = DecodeShape(16, 8, 4, 128, 132, 4, 510, 8 * 4352, 4352, 4, 0, 6, 1 << 6 | 1 << 7, 128**-0.5)


@pytest.mark.parametrize(
    "widths", [((8, 8, 8), (1,) * 8), ((8, 7), (2,) * 8, (1, 1)), ((3,) * 6, (6, 6, 5)), ((1,), (2,))]
)
def test_planes_that_a_head_lacks_lie_in_its_stage(widths: tuple[tuple[int, ...], ...]) -> None:
    """Of every head as many planes are read as the most have: 256 bytes of two bits, then 128 of one."""
    rows = [torch.randn(16 * len(mine), 128) for mine in widths]
    found = KeyPlanes.of(rows, [torch.ones(len(part)) for part in rows], list(widths), 128, 4)
    assert found is not None
    smallest = max(sum(map(block_bytes, mine)) for mine in widths) + SCALE_BYTES
    shape = replace(LLAMA, head_bytes=smallest, steps=found.steps, kinds=found.kinds)
    for mine in widths:
        twos, reads = sum(width // 2 for width in mine), 2 * found.steps - 1
        ends = [256 * i if i <= twos else 128 * (twos + i) for i in range(1, reads + 1)]
        assert max(ends) <= shape.stage_bytes
        assert len(ends) >= twos + sum(width % 2 for width in mine)


def test_one_program_of_sixteen_warps_fits_where_registers_allow() -> None:
    tuning = Tuning.of(LLAMA)
    assert (tuning.warps, tuning.programs) == (16, 1)
    assert tuning.fitting(LLAMA, SHARED) == tuning
    assert Tuning.of(replace(LLAMA, fast=6)).warps == 12
    assert Tuning.of(replace(LLAMA, group=8)).warps == 12
    assert Tuning.of(replace(LLAMA, group=8, fast=6)).warps == 8


def test_warps_that_multiply_together_leave_together() -> None:
    large = replace(LLAMA, head_bytes=16 * 1024)
    found = Tuning.of(large).fitting(large, SHARED)
    assert found.warps % 4 == 0
    assert 4 <= found.warps < 16
    assert large.shared_bytes(found) <= SHARED < large.shared_bytes(replace(found, warps=found.warps + 4))


def test_exact_tokens_are_programs_of_their_own_only_where_there_is_room() -> None:
    def shares(shape: DecodeShape) -> tuple[int, int, bool]:
        splits = shape.splits(Tuning.of(shape), PROCESSORS)
        return splits, *shape.exact(splits, PROCESSORS)

    assert shares(LLAMA) == (1, 1, True)
    assert shares(replace(LLAMA, batch=1, max_tiles=126)) == (8, 4, False)
    assert shares(replace(LLAMA, batch=1, max_tiles=2046)) == (16, 16, True)
    # the kernel for older devices has no such programs
    assert shares(replace(LLAMA, steps=0))[1:] == (1, False)


@pytest.mark.parametrize("source", ["tiles_sm90.cu", "decode_sm90.cu"])
def test_barriers_share_their_memory_with_nothing(source: str) -> None:
    """What a barrier was may come back where a program writes other things over it: all else lies behind them."""
    text = (Path(launch.__file__).parent / source).read_text(encoding="utf-8")
    found = sorted(line.split("//")[0].strip() for line in text.splitlines() if re.search(r"\bsmem\b", line))
    assert found == [
        "extern __shared__ __align__(128) u8 smem[];",
        "u8* const room = smem + BARRIERS;",
        "unsigned long long* barriers = (unsigned long long*)smem;",
    ]
