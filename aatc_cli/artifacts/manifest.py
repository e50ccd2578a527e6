"""Manifest of an artifact: what it says of itself, its digest, and what two of them differ in."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aatc_cli.artifacts.changes import changes_in_words
from aatc_cli.artifacts.disk import read_record
from aatc_cli.config import Geometry
from aatc_cli.errors import ArtifactError
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


def read_manifest(path: Path) -> Manifest:
    """Read and verify the manifest in the directory ``path``; raises `ArtifactError` with the remedy."""
    file = path / MANIFEST
    if not file.is_file():
        raise ArtifactError(
            f"{path} is not an artifact: it has no {MANIFEST}", "give the directory of an artifact, or remove this one"
        )
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


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What differs between two manifests as JSON data, but for what a model was called."""
    return _content(changes_in_words(found, wanted), "model.")


def require_model(found: ModelIdentity, wanted: ModelIdentity, what: str) -> None:
    """Raise `ArtifactError` unless both identities are the same, naming the first field that differs."""
    differences = _content(changes_in_words(wanted.model_dump(mode="json"), found.model_dump(mode="json")))
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


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _content(differences: Iterable[str], where: str = "") -> list[str]:
    """Without those in what a model was called: a copy in another folder is the same model."""
    labels = (f"{where}name was ", f"{where}revision was ")
    return [text for text in differences if not text.startswith(labels)]
