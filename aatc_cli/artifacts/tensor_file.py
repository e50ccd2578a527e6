"""A safetensors file written tensor by tensor, so that no more than one of them has to be in memory."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# names of the safetensors format
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
# the widest first: every tensor of a file then begins at a multiple of its element size
_SIZES = (8, 4, 2, 1)
_CHUNK = 1 << 22


def dtype_name(tensor: Tensor | NDArray[Any]) -> str:
    """``float32``, ``uint8``: as torch and numpy both call it."""
    return str(tensor.dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor | NDArray[Any]) -> memoryview:
    """The tensor's bytes in row-major little-endian order; of a contiguous tensor on the CPU, without a copy."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def tensor_digest(tensor: Tensor | NDArray[Any]) -> str:
    """sha256 of the tensor's bytes in row-major little-endian order."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


class TensorFile:
    """Context manager that gathers tensors beside ``path`` as they come and makes the safetensors file of them.

    The format has its header, which counts all tensors, in front. So bytes go to one part file for every element size,
    and `finish` writes the header and appends the parts; disk space of up to twice the file is needed for that moment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, list[tuple[str, tuple[int, ...], str, int]]] = {size: [] for size in _SIZES}
        self._files: dict[int, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, name: str, tensor: Tensor | NDArray[Any]) -> None:
        """Write the bytes of ``tensor``, which may change or go afterwards; raises `OSError` as the disk does."""
        size = tensor.itemsize
        data = tensor_bytes(tensor)
        if size not in self._files:
            self._files[size] = self._stack.enter_context(self._part(size).open("wb"))
        self._files[size].write(data)
        self._entries[size].append((name, tuple(tensor.shape), DTYPES[dtype_name(tensor)], data.nbytes))

    def finish(self) -> None:
        """Write the file and remove the parts; raises `OSError`."""
        self.close()
        header = json.dumps(self._header(), separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with self._path.open("wb") as whole:
            whole.write(len(header).to_bytes(8, "little") + header)
            for size in _SIZES:
                if self._entries[size]:
                    with self._part(size).open("rb") as part:
                        shutil.copyfileobj(part, whole, _CHUNK)
                    self._part(size).unlink()

    def close(self) -> None:
        """Close the part files, which stay where they are."""
        self._stack.close()

    def _part(self, size: int) -> Path:
        return self._path.with_name(f"{self._path.name}.part{size}")

    def _header(self) -> dict[str, Any]:
        header: dict[str, Any] = {}
        end = 0
        for size in _SIZES:
            for name, shape, dtype, count in self._entries[size]:
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + count]}
                end += count
        return header
