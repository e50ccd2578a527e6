"""Compile CUDA sources at first use, through CuPy, and call them on torch's current stream."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError

# numbers of the element types in the sources
ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def fused_available() -> bool:
    """Whether a CUDA device of compute capability 8 or above and CuPy are there."""
    try:
        import_module("cupy")
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def function(source: str, name: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    """The compiled function ``name`` of ``source`` on a device; raises `AatcError` when CuPy is missing."""
    return _module(source, defines, device).get_function(name)


@lru_cache
def _module(source: str, defines: tuple[tuple[str, int], ...], device: int) -> Any:
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise AatcError("the fused kernels need CuPy", "pip install 'aatc[cuda]', or run without them") from error
    text = (Path(__file__).parent / source).read_text(encoding="utf-8")
    options = (*(f"-D{key}={value}" for key, value in defines), "--std=c++17")
    with cupy.cuda.Device(device):
        return cupy.RawModule(code=text, options=options, backend="nvrtc")


def launch(
    compiled: Any, grid: tuple[int, int, int], threads: int, numbers: tuple[Any, ...], tensors: tuple[Tensor, ...],
    shared: int = 0,
) -> None:  # fmt: skip
    """Launch on torch's current stream: ``numbers`` come first in the signature, then the tensors' addresses."""
    device = tensors[0].device
    stream = import_module("cupy").cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device.index or 0)
    with stream:
        compiled(grid, (threads,), (*numbers, *(tensor.data_ptr() for tensor in tensors)), shared_mem=shared)
