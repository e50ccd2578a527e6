"""Which files hold a model's weights, and whether each of them is whole."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aatc_cli.errors import AatcError
from aatc_cli.models.source import ModelSource

# a file kept by Git LFS before it is fetched, which is a few lines of text
_POINTER = b"version https://git-lfs"
_FETCH = "fetch the model again"
# in the order in which transformers looks for them
_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a .safetensors file: its name, dtype and shape as the file says, and the bytes it lies at."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weight_files(source: ModelSource) -> list[Path]:
    """The files that transformers reads the weights from, and no other; those of a hub's model are fetched.

    Raises `AatcError` naming the file that is missing, or is a pointer of Git LFS.
    """
    if source.gguf:
        return [_whole(source.folder / source.gguf)]
    if "transformers_weights" in read_json(_file(source, "config.json")):
        problem = f"the configuration of {source.name} names its weight file itself (transformers_weights)"
        raise AatcError(problem, "save the model with save_pretrained and give that folder")
    for name in _FILES:
        if (path := _file(source, name)).exists():
            return [_whole(path)]
        if (index := _file(source, name + _INDEX)).exists():
            return [_shard(source, index, shard) for shard in _shards(index)]
    others = sorted(path.name for path in source.folder.glob("*.safetensors"))
    beside = f"; {others[0]} is not read, for no {_FILES[0]}{_INDEX} names it" if others else ""
    problem = f"{source.name} has no weight files ({_FILES[0]} or {_FILES[0]}{_INDEX}){beside}"
    raise AatcError(problem, "download the model's weights first")


def stored_tensors(path: Path) -> list[StoredTensor]:
    """What the header of a .safetensors file lists; raises `AatcError` for one that is cut short or damaged."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        text = handle.read(min(length, size))
    if size < 8 + length:
        raise AatcError(f"the weight file {path} is cut short: its header is not all there", _FETCH)
    try:
        header = json.loads(text)
        tensors = [
            StoredTensor(name, str(entry["dtype"]), tuple(entry["shape"]), *(8 + length + at for at in _span(entry)))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise AatcError(f"the weight file {path} has no valid header", _FETCH) from error
    end = max((tensor.end for tensor in tensors), default=8 + length)
    if size < end:
        raise AatcError(f"the weight file {path} is cut short: it has {size} of {end} bytes", _FETCH)
    return tensors


def _span(entry: dict[str, Any]) -> tuple[int, int]:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"{begin} to {end}")
    return begin, end


def _shards(index: Path) -> list[str]:
    """The files that an index names, in name order."""
    found = read_json(index).get("weight_map")
    names = sorted(set(found.values())) if isinstance(found, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise AatcError(f"{index} does not say which files beside it hold the weights", _FETCH)
    return names


def _shard(source: ModelSource, index: Path, name: str) -> Path:
    path = _file(source, name)
    if not path.exists():
        raise AatcError(f"the weight file {path} is missing, which {index.name} names", _FETCH)
    return _whole(path)


def _whole(path: Path) -> Path:
    """Raise `AatcError` for a file that only says where its content is, or is cut short."""
    if not path.is_file():
        raise AatcError(f"the weight file {path} is not a regular file", _FETCH)
    with path.open("rb") as handle:
        if handle.read(len(_POINTER)) == _POINTER:
            problem = f"the weight file {path} is a pointer of Git LFS: the weights themselves were not fetched"
            raise AatcError(problem, "run git lfs pull in that folder")
    if path.suffix == ".safetensors":
        stored_tensors(path)
    return path


def _file(source: ModelSource, name: str) -> Path:
    return source.snapshot.fetch(name) if source.snapshot else source.folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of the model's folder; raises `AatcError` for one that holds no JSON object."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AatcError(f"{path} cannot be read as JSON: {error}", _FETCH) from error
    if not isinstance(found, dict):
        raise AatcError(f"{path} is not a JSON object", _FETCH)
    return found
