"""A live compressed cache on disk: safetensors and a manifest, read back only into the same plan and model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aatc_cli.artifacts.disk import flush, read_record, replace_directory, temporary_beside, unwritable, write_text
from aatc_cli.artifacts.locking import locked, sweep
from aatc_cli.artifacts.manifest import MANIFEST, TENSORS, TensorEntry, digest_of
from aatc_cli.artifacts.tensor_file import tensor_digest
from aatc_cli.config import Window
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.profiles import explain
from aatc_cli.runtime.batch import Group
from aatc_cli.runtime.model_digest import model_digest
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.state import CompressedState

# version 1 knew a model by 64 numbers of every weight
_VERSION = 2


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GroupRecord(_Record):
    """Sequences of equal length: their rows in the batch, tokens each, and the position of the first token."""

    rows: list[int]
    offset: int
    length: int


class CacheManifest(_Record):
    """What the tensors of a saved cache mean and whose they are. ``digest`` covers every other field."""

    schema_version: Literal[2]
    kind: Literal["cache"]
    plan: str
    model: str
    window: Window
    columns: int
    groups: list[GroupRecord]
    tensors: dict[str, TensorEntry]
    digest: str

    def computed_digest(self) -> str:
        """sha256 of the canonical JSON of everything but the digest."""
        return digest_of(self.model_dump(mode="json", exclude={"digest"}))


def save_cache(cache: HostedCache, session: Session, folder: Path) -> None:
    """Write ``cache`` to ``folder``, whole or not at all, replacing what is there.

    Raises `AatcError` when the disk does not take it, or a forward pass through the cache was interrupted.
    """
    spec, state = live_state(cache, session)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors().items()}
    draft = CacheManifest(
        schema_version=2,
        kind="cache",
        plan=spec.digest,
        model=model_digest(session.model),
        window=spec.window,
        columns=state.columns,
        groups=[GroupRecord(rows=g.rows, offset=g.offset, length=g.length) for g in state.groups],
        tensors={name: _entry(tensor) for name, tensor in tensors.items()},
        digest="",
    )
    manifest = draft.model_copy(update={"digest": draft.computed_digest()})
    temporary = temporary_beside(folder, "tmp")
    try:
        with _held(folder):
            try:
                temporary.mkdir()
                save_file(tensors, temporary / TENSORS)
                flush(temporary / TENSORS)
                write_text(temporary / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
                replace_directory(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as failure:
        raise unwritable(folder, failure) from failure


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold the place of one saved cache for writing, waiting for another writer; clear what a killed one left."""
    with locked(folder.parent, f".{folder.name}.lock", wait=True):
        sweep(folder.parent, folder.name)
        yield


def load_cache(session: Session, folder: Path) -> HostedCache:
    """The cache saved in ``folder``, going on exactly where it stopped.

    Raises `ArtifactError` when it is absent, damaged, or of another plan, model or schema.
    """
    spec, manifest = _saved_spec(session), _read_manifest(folder)
    for what, found, wanted in (
        ("plan", manifest.plan, spec.digest),
        ("model", manifest.model, model_digest(session.model)),
    ):
        if found != wanted:
            raise ArtifactError(
                f"the cache in {folder} was made with another {what}", f"use the {what} it was made with"
            )
    tensors = _read_tensors(folder, manifest)
    _check_groups(folder, manifest, spec)
    return restored(session, folder, manifest.columns, manifest.groups, tensors)


def live_state(cache: HostedCache, session: Session) -> tuple[CacheSpec, CompressedState]:
    """What a cache of ``session`` holds, and what its caches share, to be written down.

    Raises `AatcError` for a cache of another session, one that no file holds, or a forward pass that was interrupted.
    """
    spec = _saved_spec(session)
    session.admit(cache)
    state = cache.state
    assert isinstance(state, CompressedState)
    if any(store.tokens != group.length for group in state.groups for store in group.stores):
        raise AatcError("a forward pass through this cache was interrupted", "begin a new cache")
    return spec, state


def restored(
    session: Session, place: Path, columns: int, groups: Sequence[GroupRecord], tensors: Mapping[str, torch.Tensor]
) -> HostedCache:
    """A cache of ``session`` with these contents; raises `ArtifactError` naming ``place`` when they do not fit it."""
    spec = _saved_spec(session)
    cache: HostedCache = session.new_cache()
    state = cache.state
    assert isinstance(state, CompressedState)
    state.columns, state.batch = columns, sum(len(group.rows) for group in groups) or -1
    for index, record in enumerate(groups):
        stores = spec.stores(len(record.rows))
        for layer, store in enumerate(stores):
            prefix = f"groups.{index}.layers.{layer}."
            held = {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}
            if not store.fits(held, record.length):
                raise _damaged(place, f"layer {layer} of group {index} is not that of {record.length} tokens")
            # a clone owns its storage: what safetensors hands out may be part of a larger one
            store.load({name: part.to(spec.device).clone() for name, part in held.items()}, record.length)
        state.groups.append(Group(record.rows, record.offset, record.length, stores))
    if state.tensors().keys() != tensors.keys():
        raise _damaged(place, "it holds tensors of no layer")
    return cache


def _read_tensors(folder: Path, manifest: CacheManifest) -> dict[str, torch.Tensor]:
    """All tensors of a saved cache, each as the manifest has it; shapes are compared before anything is read."""
    file = folder / TENSORS
    if file.is_symlink() or not file.is_file():
        raise _damaged(folder, f"{TENSORS} is missing or not a regular file")
    tensors = {}
    try:
        with safe_open(file, framework="pt") as handle:
            if set(handle.keys()) != set(manifest.tensors):
                raise _damaged(folder, f"{TENSORS} does not hold the tensors that the manifest lists")
            for name, entry in manifest.tensors.items():
                if tuple(handle.get_slice(name).get_shape()) != entry.shape:
                    raise _damaged(folder, f"tensor {name!r} is not the one recorded")
                tensors[name] = handle.get_tensor(name)
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(folder, f"{TENSORS} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if _entry(tensor) != manifest.tensors[name]:
            raise _damaged(folder, f"tensor {name!r} is not the one recorded")
    return tensors


def _check_groups(folder: Path, manifest: CacheManifest, spec: CacheSpec) -> None:
    """Raise `ArtifactError` unless every row of the batch is in one group, and no group is longer than what was fed."""
    rows = sorted(row for group in manifest.groups for row in group.rows)
    sound = rows == list(range(len(rows))) and manifest.columns >= 0 and bool(rows) == bool(manifest.groups)
    for group in manifest.groups:
        sound = sound and bool(group.rows) and group.offset >= 0 and 0 <= group.length <= manifest.columns
    if not sound or manifest.window != spec.window:
        raise _damaged(folder, "its groups of sequences do not make a batch")


def _saved_spec(session: Session) -> CacheSpec:
    """What the caches of a session share; raises `AatcError` for those that are not written to files."""
    if session.spec is None or session.spec.form.kind == "simulated":
        raise AatcError(
            f"the caches of {session.name} are {session.kind}, which no file holds",
            "save caches that are packed or fused",
        )
    return session.spec


def _read_manifest(folder: Path) -> CacheManifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise ArtifactError(f"there is no saved cache at {folder}", "give a folder that save_cache wrote")
    try:
        text = read_record(file)
        version = json.loads(text).get("schema_version")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(folder, f"its manifest cannot be read: {error}") from error
    if type(version) is not int or version != _VERSION:
        raise ArtifactError(
            f"{folder} has schema version {version!r}; this aatc reads version {_VERSION}", "save the cache again"
        )
    try:
        manifest = CacheManifest.model_validate_json(text)
    except ValidationError as error:
        raise _damaged(folder, f"its manifest is not valid: {explain(error)}") from error
    if manifest.computed_digest() != manifest.digest:
        raise _damaged(folder, "its manifest does not match its own digest")
    return manifest


def _entry(tensor: torch.Tensor) -> TensorEntry:
    name = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(dtype=name, shape=tuple(tensor.shape), sha256=tensor_digest(tensor))


def _damaged(folder: Path, reason: str) -> ArtifactError:
    return ArtifactError(f"the cache in {folder} is damaged: {reason}", "fill the cache from its text again")
