"""Compile CUDA sources at first use, through CuPy, and call them on torch's current stream."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.wgmma import wgmma_source

_FOLDER = Path(__file__).parent
# numbers of the element types in the sources
ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}


def fused_available() -> bool:
    """Whether a CUDA device of compute capability 8 or above and CuPy are there."""
    try:
        import_module("cupy")
    except ImportError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8


def on_hopper(device: torch.device) -> bool:
    """Whether the device has warpgroup products on 8-bit floats (compute capability 9.0)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def function(source: str, name: str, defines: tuple[tuple[str, int | str], ...], device: int) -> Any:
    """The compiled function ``name`` of ``source`` on a device; raises `AatcError` when CuPy is missing."""
    return _module(source, defines, device).get_function(name)


def source_text(source: str, defines: Mapping[str, Any]) -> str:
    """A CUDA source with the headers it includes in place."""

    def header(match: re.Match[str]) -> str:
        if match[1] == "wgmma.cuh":
            slow = -(-defines["G"] // 4) if defines["JF"] < defines["D"] // 16 else 0
            return wgmma_source(defines["JF"] + slow)
        if match[1] == "wgmma_whole.cuh":
            return wgmma_source(defines["D"] // 16)
        return (_FOLDER / match[1]).read_text(encoding="utf-8")

    return re.sub(r'^#include "(.+)"$', header, (_FOLDER / source).read_text(encoding="utf-8"), flags=re.MULTILINE)


@lru_cache
def _module(source: str, defines: tuple[tuple[str, int | str], ...], device: int) -> Any:
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        raise AatcError("the fused kernels need CuPy", "pip install 'aatc[cuda]', or run without them") from error
    text = source_text(source, dict(defines))
    options = (*(f"-D{key}={value}" for key, value in defines), "--std=c++17")
    with cupy.cuda.Device(device):
        if "wgmma" not in text:
            return cupy.RawModule(code=text, options=options, backend="nvrtc")
        # CuPy compiles for the portable part of an architecture; warpgroup products are in the other
        return _compiled(cupy, text, (*options, "-default-device", "--gpu-architecture=sm_90a"))


def _compiled(cupy: Any, text: str, options: tuple[str, ...]) -> Any:
    """A module from NVRTC's own compiler, kept on disk beside CuPy's."""
    nvrtc = cupy.cuda.nvrtc
    key = hashlib.sha256(repr((text, options, nvrtc.getVersion())).encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    kept = folder / f"aatc-{key[:40]}.cubin"
    if not kept.is_file():
        program = nvrtc.createProgram(text, "decode.cu", (), ())
        try:
            nvrtc.compileProgram(program, options)
            binary = nvrtc.getCUBIN(program)
        except nvrtc.NVRTCError as error:
            raise AatcError(f"NVRTC refused the kernel: {nvrtc.getProgramLog(program)}", "update CUDA") from error
        finally:
            nvrtc.destroyProgram(program)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(binary)
        os.replace(file.name, kept)
    return cupy.RawModule(path=str(kept))


def launch(
    compiled: Any,
    grid: tuple[int, int, int],
    threads: int,
    numbers: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    shared: int = 0,
) -> None:
    """Launch on torch's current stream: ``numbers`` come first in the signature, then the tensors' addresses."""
    device = tensors[0].device
    stream = import_module("cupy").cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device.index or 0)
    with stream:
        compiled(grid, (threads,), (*numbers, *(tensor.data_ptr() for tensor in tensors)), shared_mem=shared)
