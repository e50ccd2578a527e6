"""Rates of a CUDA device, measured: reading memory, integer instructions, products of 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

from aatc_cli.evals.bench.attention import graph_seconds
from aatc_cli.evals.bench.roofline import DeviceRates
from aatc_cli.runtime.kernels.launch import function, launch

_READ_BYTES = 2 << 30
_SIDE = 8192
_BLOCKS, _THREADS, _ROUNDS, _WORDS = 16, 256, 4096, 8
_REPEATS = 7


@lru_cache
def device_rates(device: torch.device) -> DeviceRates | None:
    """Measured once in a process; None on a device without products of 8-bit floats (before compute capability 8.9)."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    return DeviceRates(_read_rate(device), _integer_rate(device), _product_rate(device))


def _read_rate(device: torch.device) -> float:
    """Bytes per second of the faster of a sum, which only reads, and a copy, which writes as much as it reads."""
    source = torch.zeros(_READ_BYTES // 4, device=device)
    target = torch.empty_like(source)
    summed = _READ_BYTES / _fastest(lambda: source.sum())
    return max(summed, 2 * _READ_BYTES / _fastest(lambda: target.copy_(source)))


def _integer_rate(device: torch.device) -> float:
    """Shifts and masks per second, of single threads."""
    compiled = function("rates.cu", "integer_rate", (), device.index or 0)
    blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.zeros(1, dtype=torch.int32, device=device)
    numbers = np.int32(_ROUNDS), np.int32(2), np.uint32(0x03030303)
    seconds = _fastest(lambda: launch(compiled, (blocks, 1, 1), _THREADS, numbers, (out,)))
    return 2 * _WORDS * _ROUNDS * _THREADS * blocks / seconds


def _product_rate(device: torch.device) -> float:
    """Multiply-adds per second of one large product of e4m3 matrices."""
    first, second = (torch.zeros(_SIDE, _SIDE, device=device).normal_().to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    seconds = _fastest(
        lambda: torch._scaled_mm(first, second.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    )
    return _SIDE**3 / seconds


def _fastest(work: Callable[[], object]) -> float:
    def call() -> int:
        work()
        return 1

    return min(graph_seconds(call, _REPEATS))
