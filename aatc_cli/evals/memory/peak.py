"""Bytes behind tensors, and the most memory that process or device ever held."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all storages behind ``tensors``, each counted once and whole."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


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
