"""A safetensors file written tensor by tensor, so that no more than one of them has to be in memory."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch

# names of the safetensors format
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# the widest first: every tensor of a file then begins at a multiple of its element size
_SIZES = (8, 4, 2, 1)
_CHUNK = 1 << 22


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major little-endian order; of a contiguous tensor on the CPU, without a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


class TensorFile:
    """Context manager that gathers tensors beside ``path`` as they come and makes the safetensors file of them.

    The format has its header, which counts all tensors, in front. So bytes go to one part file for every element size,
    and `finish` writes the header and appends the parts; disk space of up to twice the file is needed for that moment.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[int, list[tuple[str, torch.Size, str, int]]] = {size: [] for size in _SIZES}
        self._files: dict[int, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the bytes of ``tensor``, which may change or go afterwards; raises `OSError` as the disk does."""
        size = tensor.element_size()
        data = tensor_bytes(tensor)
        if size not in self._files:
            self._files[size] = self._stack.enter_context(self._part(size).open("wb"))
        self._files[size].write(data)
        self._entries[size].append((name, tensor.shape, _DTYPES[tensor.dtype], data.nbytes))

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
