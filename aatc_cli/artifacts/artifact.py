"""Artifacts: a manifest and a safetensors file, written whole or not at all, and read only when they are intact."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from aatc_cli.artifacts.disk import flush, read_record, replace_directory, unwritable, write_text
from aatc_cli.artifacts.tensor_file import TensorFile, tensor_bytes
from aatc_cli.config import Geometry
from aatc_cli.errors import ArtifactError, SettingsMismatchError
from aatc_cli.profiles import explain

# by kind: head groups of keys and values are recorded apart since version 2
SCHEMA_VERSIONS = {"stats": 1, "transform": 2, "plan": 2}
MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
Kind = Literal["stats", "transform", "plan"]
REMEDY: dict[str, str] = {"stats": "aatc collect", "transform": "aatc whiten", "plan": "aatc allocate"}


class _Record(BaseModel):
    # constants: a NaN must reach the digest, which refuses it, and not be written as null
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class TensorEntry(_Record):
    """What a tensor of the artifact must be: dtype and shape as torch names them, and the hash of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ModelIdentity(_Record):
    """Which model an artifact belongs to, by content: ``name`` and ``revision`` only say what it was called."""

    name: str
    revision: str | None
    architecture: str
    config_hash: str
    weights_fingerprint: str
    tokenizer_hash: str
    geometry: Geometry


class TextRecord(_Record):
    """One text source as it was used. The hash covers the text itself; no path is kept."""

    name: str
    weight: float
    sha256: str
    tokens: int
    windows: int


class Manifest(_Record):
    """The validated description of an artifact. ``digest`` covers every field but itself and ``provenance``."""

    schema_version: int
    kind: Kind
    settings: dict[str, Any]
    model: ModelIdentity
    inputs: dict[str, str]
    texts: list[TextRecord]
    tensors: dict[str, TensorEntry]
    results: dict[str, Any]
    digest: str
    provenance: dict[str, Any]

    def computed_digest(self) -> str:
        """sha256 of the canonical JSON of everything that is hashed."""
        return digest_of(self.model_dump(mode="json", exclude={"digest", "provenance"}))


def digest_of(data: object) -> str:
    """sha256 of the canonical JSON form of ``data``: sorted keys, no spaces, shortest round-trip floats."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's bytes in row-major little-endian order."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


class ArtifactWriter:
    """Context manager that owns one artifact directory: temporary folder, manifest last, atomic rename.

    Tensors go to disk as they are added, so that an artifact never has to fit in memory. Nothing appears under
    ``path`` unless `commit` was called and the block ended without an exception.
    """

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path = path
        self.kind = kind
        self._temporary = path.parent / f".{path.name}.tmp-{os.getpid()}"
        self._made: list[Path] = []
        self._file = TensorFile(self._temporary / TENSORS)
        self._entries: dict[str, TensorEntry] = {}
        self._manifest: Manifest | None = None

    def __enter__(self) -> Self:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._made = [folder for folder in self._temporary.parents if not folder.exists()]
        self._temporary.mkdir(parents=True)
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` under ``name``, each name once and before `commit`; raises `AatcError` on a full disk."""
        assert self._manifest is None
        assert name not in self._entries, name
        tensor = tensor.detach().cpu().contiguous()
        try:
            self._file.add(name, tensor)
        except OSError as failure:
            raise unwritable(self.path, failure) from failure
        self._entries[name] = TensorEntry(
            dtype=_dtype_name(tensor.dtype), shape=tuple(tensor.shape), sha256=tensor_digest(tensor)
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
            provenance=dict(provenance or {}),
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

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor; raises `ArtifactError` if its shape, dtype or bytes are not what the manifest says."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise damaged(self.path, self.manifest.kind, f"it has no tensor {name!r}")
        try:
            with safe_open(self.path / TENSORS, framework="pt") as handle:
                view = handle.get_slice(name)
                if tuple(view.get_shape()) != entry.shape:
                    raise damaged(self.path, self.manifest.kind, f"tensor {name!r} has another shape than recorded")
                tensor: torch.Tensor = handle.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise damaged(self.path, self.manifest.kind, f"tensor {name!r} cannot be read: {error}") from error
        if _dtype_name(tensor.dtype) != entry.dtype or tensor_digest(tensor) != entry.sha256:
            raise damaged(self.path, self.manifest.kind, f"tensor {name!r} does not match its recorded hash")
        return tensor

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
        array: NDArray[Any] = self.tensor(name).numpy()
        fits = array.ndim == len(shape) and all(want in (-1, got) for want, got in zip(shape, array.shape, strict=True))
        if not fits or not np.issubdtype(array.dtype, np.floating):
            raise self.damaged(f"tensor {name!r} does not hold finite numbers of shape {list(shape)}")
        return array

    def damaged(self, reason: str) -> ArtifactError:
        """The error for this artifact when it must not be used."""
        return damaged(self.path, self.manifest.kind, reason)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors in name order, each verified."""
        for name in self.manifest.tensors:
            yield name, self.tensor(name)


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
    try:
        with safe_open(data, framework="pt") as handle:
            names = set(handle.keys())
    except (SafetensorError, OSError) as error:
        raise damaged(path, kind, f"{TENSORS} cannot be read: {error}") from error
    if names != set(manifest.tensors):
        raise damaged(path, kind, f"{TENSORS} does not hold the tensors that the manifest lists")
    return Artifact(path, manifest)


def read_manifest(path: Path) -> Manifest:
    """Read and verify the manifest in the directory ``path``; raises `ArtifactError` with the remedy."""
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(f"{path} is not an artifact: it has no {MANIFEST}", "give the directory of an artifact")
    try:
        text = read_record(file)
        raw = json.loads(text, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} cannot be read: {error}", "make the artifact again with --force") from error
    _check_schema(path, raw)
    try:
        manifest = Manifest.model_validate_json(text)
        actual = manifest.computed_digest()
    except ValidationError as error:
        raise damaged(path, str(raw.get("kind")), f"its manifest is not valid: {explain(error)}") from error
    except ValueError as error:
        raise damaged(path, str(raw.get("kind")), f"its manifest is not valid: {error}") from error
    if actual != manifest.digest:
        raise damaged(path, manifest.kind, "its manifest does not match its own digest")
    return manifest


def _check_schema(path: Path, raw: object) -> None:
    """Raise `ArtifactError` unless the manifest has the schema version of its kind, or of any if it names none."""
    if not isinstance(raw, dict):
        raise damaged(path, "artifact", "its manifest is not a JSON object")
    version, kind = raw.get("schema_version"), raw.get("kind")
    every = sorted(set(SCHEMA_VERSIONS.values()))
    known = [SCHEMA_VERSIONS[kind]] if isinstance(kind, str) and kind in SCHEMA_VERSIONS else every
    if type(version) is not int or version not in known:
        raise ArtifactError(
            f"{path} has schema version {version!r}; this aatc reads version {' or '.join(map(str, known))}",
            "use the aatc that wrote it, or make the artifact again with --force",
        )


def unchanged(path: Path, kind: Kind, wanted: Mapping[str, Any], *, force: bool) -> Manifest | None:
    """The existing manifest if it was made from exactly ``wanted``, None if the stage must run.

    ``wanted`` holds ``settings``, ``inputs``, ``model`` and ``texts`` as JSON data. Raises `SettingsMismatchError`
    naming each difference when the artifact exists with others and ``force`` is off.
    """
    if force or not path.exists():
        return None
    manifest = open_artifact(path, kind).manifest
    current = manifest.model_dump(mode="json", include=set(wanted))
    differences = _content(_differences("", current, json.loads(json.dumps(wanted))), "model.")
    if differences:
        shown = "; ".join(differences[:5]) + ("; ..." if len(differences) > 5 else "")
        raise SettingsMismatchError(
            f"{path} was made with other settings: {shown}", "add --force to replace it, or use another --run directory"
        )
    return manifest


def require_model(found: ModelIdentity, wanted: ModelIdentity, what: str) -> None:
    """Raise `ArtifactError` unless both identities are the same, naming the first field that differs."""
    differences = _content(_differences("", wanted.model_dump(mode="json"), found.model_dump(mode="json")))
    if differences:
        raise ArtifactError(
            f"the model is not the one {what} was made for: {differences[0]}",
            "use the model it was made for, or collect statistics for this one into another --run directory",
        )


def damaged(path: Path, kind: str, reason: str) -> ArtifactError:
    """The error for an artifact that must not be used, with the command that makes it again."""
    return ArtifactError(
        f"{path} is damaged: {reason}", f"make it again: {REMEDY.get(kind, 'the stage that wrote it')} --force"
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _content(differences: Iterable[str], where: str = "") -> list[str]:
    """Without those in what a model was called: a copy in another folder is the same model."""
    labels = (f"{where}name was ", f"{where}revision was ")
    return [text for text in differences if not text.startswith(labels)]


def _differences(where: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from _differences(f"{where}.{key}" if where else key, old.get(key), new.get(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(f"{where}[{index}]", a, b)
    elif old != new:
        yield f"{where} was {_short(old)}, now {_short(new)}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
