"""Artifact: a manifest and a safetensors file, written whole or not at all, and read only when they are intact."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from aatc_cli.artifacts.disk import flush, replace_directory, temporary_beside, unwritable, write_text
from aatc_cli.artifacts.manifest import (
    MANIFEST,
    REMEDY,
    SCHEMA_VERSIONS,
    TENSORS,
    Kind,
    Manifest,
    ModelIdentity,
    TensorEntry,
    TextRecord,
    damaged,
    differences,
    read_manifest,
)
from aatc_cli.artifacts.tensor_file import DTYPES, TensorFile, dtype_name, tensor_digest
from aatc_cli.artifacts.versions import versions
from aatc_cli.config import Geometry
from aatc_cli.console import detail
from aatc_cli.errors import AatcError, ArtifactError, SettingsMismatchError

if TYPE_CHECKING:
    from torch import Tensor


# bytes of the header of a safetensors file, in front of its tensors, which the format allows at most
_LARGEST_HEADER = 100_000_008
_SIZES = {name: np.dtype(name).itemsize for name in DTYPES if name != "bfloat16"} | {"bfloat16": 2}


class ArtifactWriter:
    """Context manager that owns one artifact directory: temporary folder, manifest last, atomic rename.

    Tensors go to disk as they are added, so that an artifact never has to fit in memory. Nothing appears under
    ``path`` unless `commit` was called and the block ended without an exception.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path = path
        self.kind = kind
        self._temporary = temporary_beside(path, "tmp")
        self._made: list[Path] = []
        self._file = TensorFile(self._temporary / TENSORS)
        self._entries: dict[str, TensorEntry] = {}
        self._manifest: Manifest | None = None

    def __enter__(self) -> Self:
        self._made = [folder for folder in self._temporary.parents if not folder.exists()]
        self._temporary.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: Tensor | NDArray[Any]) -> None:
        """Write ``tensor`` under ``name``, each name once and before `commit`; raises `AatcError` on a full disk."""
        assert self._manifest is None
        assert name not in self._entries, name
        try:
            self._file.add(name, tensor)
        except OSError as failure:
            raise unwritable(self.path, failure) from failure
        self._entries[name] = TensorEntry(
            dtype=dtype_name(tensor), shape=tuple(tensor.shape), sha256=tensor_digest(tensor)
        )

    def commit(
        self,
        *,
        settings: Mapping[str, Any],
        model: ModelIdentity,
        inputs: Mapping[str, str] | None = None,
        texts: list[TextRecord] | None = None,
        results: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Build the manifest over what was added; the artifact takes its place when the block ends."""
        draft = Manifest(
            schema_version=SCHEMA_VERSIONS[self.kind],
            kind=self.kind,
            settings=dict(settings),
            model=model,
            inputs=dict(inputs or {}),
            texts=list(texts or []),
            tensors=dict(sorted(self._entries.items())),
            results=dict(results or {}),
            digest="",
            provenance={"versions": versions(), **(provenance or {})},
        )
        self._manifest = draft.model_copy(update={"digest": draft.computed_digest()})
        return self._manifest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._manifest is not None:
                self._place(self._manifest)
                self._made = []
        finally:
            # on a full disk closing fails too, for what is still in the buffers
            with suppress(OSError):
                self._file.close()
            shutil.rmtree(self._temporary, ignore_errors=True)
            for folder in self._made:
                with suppress(OSError):
                    folder.rmdir()

    def _place(self, manifest: Manifest) -> None:
        try:
            self._file.finish()
            flush(self._temporary / TENSORS)
        except OSError as failure:
            raise unwritable(self.path, failure) from failure
        write_text(self._temporary / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
        replace_directory(self._temporary, self.path)


class Artifact:
    """An artifact on disk: its verified manifest, and tensors that are verified as they are read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def array(self, name: str) -> NDArray[Any]:
        """Read one tensor; raises `ArtifactError` if its shape, dtype or bytes are not what the manifest says."""
        array: NDArray[Any] = self._read(name, "numpy")
        return array

    def _read(self, name: str, framework: str) -> Any:
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise self.damaged(f"it has no tensor {name!r}")
        try:
            with safe_open(self.path / TENSORS, framework=framework) as handle:
                if tuple(handle.get_slice(name).get_shape()) != entry.shape:
                    raise self.damaged(f"tensor {name!r} has another shape than recorded")
                tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise self.damaged(f"tensor {name!r} cannot be read: {error}") from error
        except MemoryError as error:
            raise _too_large(self.path, f"tensor {name!r}") from error
        if dtype_name(tensor) != entry.dtype or tensor_digest(tensor) != entry.sha256:
            raise self.damaged(f"tensor {name!r} does not match its recorded hash")
        return tensor

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.manifest.tensors

    def floats(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A tensor of finite floats with ``shape`` (-1: any length); raises `ArtifactError` when it is another."""
        array = self._shaped(name, shape)
        if not bool(np.isfinite(array).all()):
            raise self.damaged(f"tensor {name!r} does not hold finite numbers of shape {list(shape)}")
        return array

    def numbers(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Floats of ``shape`` in float64, of which some may be infinite; raises `ArtifactError` as `floats`."""
        return self._shaped(name, shape).astype(np.float64)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        array = self.array(name)
        fits = array.ndim == len(shape) and all(want in (-1, got) for want, got in zip(shape, array.shape, strict=True))
        if not fits or not np.issubdtype(array.dtype, np.floating):
            raise self.damaged(f"tensor {name!r} does not hold finite numbers of shape {list(shape)}")
        return array

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """As `array`, or with a ``shape`` as `floats`, for torch."""
        import torch

        if shape is not None:
            return torch.from_numpy(self.floats(name, shape))
        # numpy has no bfloat16
        tensor: Tensor = self._read(name, "pt")
        return tensor

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in name order, each verified."""
        for name in self.manifest.tensors:
            yield name, self.tensor(name)

    def damaged(self, reason: str) -> ArtifactError:
        """The error for this artifact when it must not be used."""
        return damaged(self.path, self.manifest.kind, reason)


@dataclass(frozen=True)
class Noun:
    """What Stats, Transform and Plan have in common: where they lie, and of which model and inputs they are."""

    artifact: Artifact

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.artifact.path

    @property
    def manifest(self) -> Manifest:
        """Its manifest, for those who show or compare all of it."""
        return self.artifact.manifest

    @property
    def digest(self) -> str:
        """sha256 over everything in it."""
        return self.artifact.manifest.digest

    @property
    def model(self) -> ModelIdentity:
        """The model it was made for."""
        return self.artifact.manifest.model

    @property
    def geometry(self) -> Geometry:
        """Cache geometry of that model."""
        return self.artifact.manifest.model.geometry

    @property
    def texts(self) -> list[TextRecord]:
        """The calibration text behind it."""
        return self.artifact.manifest.texts


def open_artifact(path: Path, kind: Kind) -> Artifact:
    """Open the artifact at ``path``; raises `ArtifactError` when it is absent, damaged or of another kind."""
    remedy = f"run {REMEDY[kind]} to make it"
    if not path.exists():
        raise ArtifactError(f"there is no {kind} at {path}", remedy)
    manifest = read_manifest(path)
    if manifest.kind != kind:
        raise ArtifactError(f"{path} holds a {manifest.kind}, not a {kind}", f"give the path of a {kind}, or {remedy}")
    data = path / TENSORS
    if data.is_symlink() or not data.is_file():
        raise damaged(path, kind, f"{TENSORS} is missing or not a regular file")
    # before it is opened: a file of holes may claim more than the memory
    size, least = data.stat().st_size, sum(_bytes(path, kind, entry) for entry in manifest.tensors.values())
    if size > least + _LARGEST_HEADER:
        raise damaged(path, kind, f"{TENSORS} cannot be read: of its {size:,} bytes tensors take {least:,}")
    try:
        with safe_open(data, framework="numpy") as handle:
            names = set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise damaged(path, kind, f"{TENSORS} cannot be read: {error}") from error
    except MemoryError as error:
        raise _too_large(path, TENSORS) from error
    if names != set(manifest.tensors):
        raise damaged(path, kind, f"{TENSORS} does not hold the tensors that the manifest lists")
    detail(f"read {kind} {path} ({manifest.digest[:12]}), {len(names)} tensors in {data.stat().st_size:,} bytes")
    return Artifact(path, manifest)


def _bytes(path: Path, kind: Kind, entry: TensorEntry) -> int:
    if entry.dtype not in _SIZES or any(length < 0 for length in entry.shape):
        raise damaged(path, kind, f"its manifest lists a tensor of {entry.dtype} {list(entry.shape)}")
    return math.prod(entry.shape) * _SIZES[entry.dtype]


def _too_large(path: Path, what: str) -> AatcError:
    return AatcError(f"{what} of {path} does not fit into the memory of this process", "raise its limit of memory")


def unchanged(path: Path, kind: Kind, wanted: Mapping[str, Any], *, force: bool) -> Manifest | None:
    """The existing manifest if it was made from exactly ``wanted``, None if the stage must run.

    ``wanted`` holds ``settings``, ``inputs``, ``model`` and ``texts`` as JSON data. Raises `SettingsMismatchError`
    naming each difference when the artifact exists with others and ``force`` is off.
    """
    if force or not path.exists():
        return None
    manifest = open_artifact(path, kind).manifest
    current = manifest.model_dump(mode="json", include=set(wanted))
    found = differences(current, wanted)
    if found:
        shown = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
        raise SettingsMismatchError(
            f"{path} was made with other settings: {shown}", "add --force to replace it, or use another --run directory"
        )
    return manifest
