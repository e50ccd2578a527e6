"""Memory of a cache: bytes that are live, bytes the law predicts, and the most that process or device ever held."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from aatc_cli.artifacts.evaluation import Measurement
from aatc_cli.config import Settings


class MemoryRow(Settings):
    """One cache at one size. Peaks are of the process on a CPU, of the device's allocator on a GPU; null if unknown."""

    context: int = Field(description="tokens per sequence")
    batch: int = Field(description="sequences")
    bytes_live: int = Field(description="sum of the storages behind the live cache, each counted once")
    bytes_predicted: int = Field(description="the byte law, with what is exact in the dtype of the cache")
    bytes_fp16: int = Field(description="of the uncompressed cache in float16")
    ratio: float = Field(description="bytes_fp16 over bytes_live")
    base_bytes: int | None = Field(description="memory in use before the first token, the model included")
    peak_bytes: int | None = Field(description="the most in use while the cache is filled and the last token decoded")
    peak_decode_bytes: int | None = Field(None, description="the most in use while the last token is decoded")
    base_bytes_reference: int | None = Field(None, description="base_bytes where the model has its own cache")
    peak_bytes_reference: int | None = Field(None, description="peak_bytes with the model's own cache, in its dtype")
    peak_decode_bytes_reference: int | None = Field(None, description="peak_decode_bytes with the model's own cache")


class MemoryResult(Measurement):
    """Memory of one plan, or of a width alone: ``synthetic`` caches hold random vectors under a random plan."""

    task: Literal["memory"] = "memory"
    synthetic: bool = Field(description="of a geometry alone: random widths of the given mean, no model")
    rows: list[MemoryRow]

    @property
    def file_name(self) -> str:
        """File the result is stored under: task, recipe, budget, and the model where there is none of the run."""
        place = "." + re.sub(r"[^A-Za-z0-9._-]+", "-", self.model) if self.synthetic else ""
        return f"{self.task}.{self.method}{place}.json"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind ``tensors``, each counted once and whole."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


def random_widths(channels: int, bits: float, low: int, high: int, generator: torch.Generator) -> list[int]:
    """Widths [C] between ``low`` and ``high`` whose sum is the integer nearest to C * ``bits``; the same for a seed."""
    spread = min(high, 2 * round(bits) + 1)
    widths: list[int] = torch.randint(low, max(spread, low) + 1, (channels,), generator=generator).tolist()
    missing = round(channels * bits) - sum(widths)
    step, end = (1, high) if missing > 0 else (-1, low)
    assert low * channels <= round(channels * bits) <= high * channels
    while missing:
        for channel in torch.randperm(channels, generator=generator).tolist():
            if missing and widths[channel] != end:
                widths[channel] += step
                missing -= step
    return widths


class Peak:
    """The most memory in use since ``restart``: of a CUDA device its allocator's, else of the process (Linux)."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def restart(self) -> int | None:
        """Forget earlier peaks; memory in use now, or None where the system does not tell."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return int(torch.cuda.memory_allocated(self.device))
        _trim()
        try:
            # 5 resets the high-water mark of the resident set to what is resident now: proc(5)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return None
        return _status("VmRSS")

    def read(self) -> int | None:
        """The highest use since `restart`; None where the system does not tell."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return _status("VmHWM")


def _trim() -> None:
    """Give freed memory back to the system where the C library can, or earlier work would count as in use."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def _status(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(field + ":")]
    return int(found[0][1]) * 1024 if found else None
