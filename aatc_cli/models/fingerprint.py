"""Fingerprint of a model's weights: every tensor's name, dtype, shape and bytes, however they are cut into files.

Copies of one model have one fingerprint when they hold the same tensors: sharded or whole, .safetensors or .bin. A
.gguf file, whose tensors are made by the reader, is taken as it is. What is known of a file is remembered by
`hash_cache`, so only files that changed are read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.tensor_file import tensor_bytes
from aatc_cli.errors import AatcError
from aatc_cli.models.hash_cache import Hashes, Stamp, recall, remember
from aatc_cli.models.weights import StoredTensor, stored_tensors

# beyond this the disk decides
_THREADS = 16
_CHUNK = 1 << 22
# what the safetensors format calls them, so that both kinds of files have the same names
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
# the name under which a file that is hashed whole stands in place of its tensors
_WHOLE = ""


def fingerprint(files: Iterable[Path]) -> str:
    """``tensors:`` and the sha256 over all tensors in name order, or ``file:`` and that of a .gguf file.

    Raises `AatcError` for damaged files, one that changes meanwhile, and a tensor that two of them hold.
    """
    found: Hashes = []
    for path in files:
        found += _hashes(path)
    names = [entry[0] for entry in found]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise AatcError(f"two weight files hold the tensor {min(twice)}", "fetch the model again")
    if names == [_WHOLE]:
        return f"file:{found[0][3]}"
    return f"tensors:{digest_of(sorted(found))}"


def _hashes(path: Path) -> Hashes:
    stamp = Stamp.of(path)
    known = recall(stamp)
    if known is not None:
        return known
    try:
        found = _measured(path)
    except OSError as error:
        raise AatcError(f"the weight file {path} cannot be read: {error.strerror}", "check its permissions") from error
    if Stamp.of(path) != stamp:
        raise AatcError(f"the weight file {path} changes while it is read", "wait until it is written")
    remember(stamp, found)
    return found


def _measured(path: Path) -> Hashes:
    if path.suffix == ".safetensors":
        tensors = stored_tensors(path)
        handle = os.open(path, os.O_RDONLY)
        try:
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
                digests = list(pool.map(lambda tensor: _span_hash(handle, tensor), tensors))
        finally:
            os.close(handle)
        return [[t.name, t.dtype, list(t.shape), digest] for t, digest in zip(tensors, digests, strict=True)]
    if path.suffix == ".bin":
        return [_tensor_hash(name, tensor) for name, tensor in _pickled(path).items()]
    with path.open("rb") as file:
        return [[_WHOLE, "", [], hashlib.file_digest(file, "sha256").hexdigest()]]


def _span_hash(handle: int, tensor: StoredTensor) -> str:
    """sha256 of a tensor's bytes. Read and not mapped: a file that is cut meanwhile is an error and no signal."""
    total = hashlib.sha256()
    buffer = bytearray(min(_CHUNK, tensor.end - tensor.begin))
    at = tensor.begin
    while at < tensor.end:
        room = memoryview(buffer)[: tensor.end - at]
        count = os.preadv(handle, [room], at)
        if not count:
            raise OSError(0, "it ends too early")
        total.update(room[:count])
        at += count
    return total.hexdigest()


def _tensor_hash(name: str, tensor: torch.Tensor) -> list[Any]:
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
    return [name, dtype, list(tensor.shape), hashlib.sha256(tensor_bytes(tensor)).hexdigest()]


def _pickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of zip files, of pickles, of torch
        raise AatcError(f"the weight file {path} cannot be read: {type(error).__name__}", "fetch it again") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in found.values()):
        raise AatcError(f"the weight file {path} does not hold tensors by name", "fetch it again")
    return found
