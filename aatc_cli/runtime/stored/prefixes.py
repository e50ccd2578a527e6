"""Prefixes in a store: a live cache cut into objects, and made again exactly as it was.

Tiles never change once they are written, so the tiles of 256 tokens of all layers are one object: prefixes that begin
alike share it. All else (sinks, the window, what its tokens received, a last incomplete object of tiles) is one object
more. A prefix is found by its tokens, under the plan, window, dtype and weights that it was made with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from aatc_cli.artifacts.disk import read_record
from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.store import Store, tokens_digest, touch
from aatc_cli.errors import AatcError, ArtifactError
from aatc_cli.models.compressed import HostedCache
from aatc_cli.profiles import explain
from aatc_cli.runtime.cache_file import GroupRecord, live_state, restored
from aatc_cli.runtime.model_digest import model_digest
from aatc_cli.runtime.session import Session

_VERSION = 1
# tiles of an object: 256 tokens
_TILES = 4


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Piece(_Record):
    """Part of a tensor in an object: the entries from ``first`` on along axis 1, of this shape."""

    tensor: str
    first: int = Field(ge=0)
    shape: tuple[int, ...] = Field(strict=False)


class Object(_Record):
    """Bytes of the store, and the pieces that follow one another in them."""

    sha256: str
    nbytes: int = Field(ge=0)
    pieces: tuple[Piece, ...] = Field(strict=False)


class PrefixRecord(_Record):
    """What a store knows of a prefix. ``digest`` covers every other field."""

    schema_version: Literal[1]
    kind: Literal["prefix"]
    plan: str
    model: str
    names: tuple[str, str] = Field(strict=False, description="what plan and model were called")
    tokens: int = Field(ge=1)
    tokens_sha256: str
    columns: int
    offset: int
    dtypes: dict[str, str]
    objects: tuple[Object, ...] = Field(strict=False)
    digest: str

    def computed_digest(self) -> str:
        """sha256 of the canonical JSON of everything but the digest."""
        return digest_of(self.model_dump(mode="json", exclude={"digest"}))


@dataclass(frozen=True)
class Found:
    """A prefix that a store had: its cache, and how many tokens it holds."""

    cache: HostedCache
    tokens: int


def put_prefix(store: Store, session: Session, cache: HostedCache, tokens: Sequence[int]) -> PrefixRecord:
    """Keep ``cache``, which holds exactly ``tokens``; raises `AatcError` for another cache or a full disk."""
    spec, state = live_state(cache, session)
    if len(state.groups) != 1 or len(state.groups[0].rows) != 1 or state.groups[0].length != len(tokens):
        held = [group.length for group in state.groups for _ in group.rows]
        raise AatcError(
            f"a stored prefix is one sequence of its own tokens, {len(tokens)}; this cache holds {held}",
            "fill a new cache with the prefix alone",
        )
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors().items()}
    # the last part of a hub id or folder; none of a model that was made in memory
    model: Any = session.model
    called = str(model.config.name_or_path).rstrip("/").rpartition("/")[2]
    names = (session.name, called or type(session.model).__name__)
    with store.writing():
        objects = tuple(_kept(store, tensors, pieces) for pieces in _pieces(tensors))
        draft = PrefixRecord(
            schema_version=1,
            kind="prefix",
            plan=spec.digest,
            model=model_digest(session.model),
            names=names,
            tokens=len(tokens),
            tokens_sha256=tokens_digest(tokens),
            columns=state.columns,
            offset=state.groups[0].offset,
            dtypes={name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
            objects=objects,
            digest="",
        )
        record = draft.model_copy(update={"digest": draft.computed_digest()})
        store.write_prefix(space_of(record.plan, record.model), tokens, record.model_dump_json() + "\n")
    return record


def find_prefix(store: Store, session: Session, tokens: Sequence[int]) -> Found | None:
    """The cache of the longest stored prefix of ``tokens`` that is sound, or None: what is damaged is passed over."""
    spec, _ = live_state(session.new_cache(), session)
    space = space_of(spec.digest, model_digest(session.model))
    for path in store.prefixes_of(space, tokens):
        try:
            return _opened(store, session, path, tokens)
        except ArtifactError:
            continue
    return None


def get_prefix(store: Store, session: Session, tokens: Sequence[int]) -> HostedCache:
    """The cache of exactly ``tokens``; raises `ArtifactError` where it is absent or damaged."""
    spec, _ = live_state(session.new_cache(), session)
    space = space_of(spec.digest, model_digest(session.model))
    path = store.prefix_path(space, len(tokens), tokens_digest(tokens))
    if not path.is_file():
        raise ArtifactError(f"{store.folder} has no prefix of these {len(tokens)} tokens", "store it by aatc cache put")
    return _opened(store, session, path, tokens).cache


def read_prefix(path: Path) -> PrefixRecord:
    """The record of a prefix; raises `ArtifactError` when it is damaged or of another version."""
    try:
        text = read_record(path)
        version = json.loads(text).get("schema_version")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from error
    if type(version) is not int or version != _VERSION:
        raise ArtifactError(f"{path} has schema version {version!r}; this aatc reads {_VERSION}", "store it again")
    try:
        record = PrefixRecord.model_validate_json(text)
    except ValidationError as error:
        raise _damaged(path, explain(error)) from error
    if record.computed_digest() != record.digest:
        raise _damaged(path, "it does not match its own digest")
    return record


def objects_of(path: Path) -> list[str]:
    """The objects that the record of a prefix names; raises as `read_prefix`."""
    return [each.sha256 for each in read_prefix(path).objects]


def space_of(plan: str, model: str) -> str:
    """Under what the prefixes of a plan (with window and dtype) on a model lie."""
    return digest_of([plan, model, _VERSION])


def _opened(store: Store, session: Session, path: Path, tokens: Sequence[int]) -> Found:
    record = read_prefix(path)
    spec, _ = live_state(session.new_cache(), session)
    wanted = (spec.digest, model_digest(session.model), len(tokens[: record.tokens]))
    if (record.plan, record.model, record.tokens) != wanted:
        raise _damaged(path, "it is of another plan or model than its place says")
    if record.tokens_sha256 != tokens_digest(tokens[: record.tokens]):
        raise _damaged(path, "it is of other tokens than its name says")
    group = GroupRecord(rows=[0], offset=record.offset, length=record.tokens)
    cache = restored(session, path, record.columns, [group], _joined(store, path, record))
    touch(path)
    return Found(cache, record.tokens)


def _pieces(tensors: Mapping[str, Tensor]) -> list[list[Piece]]:
    """What goes into which object: whole objects of tiles, then all the rest."""
    tiles = {name: tensor for name, tensor in tensors.items() if name.endswith(".tiles")}
    whole = min((tensor.shape[1] // _TILES for tensor in tiles.values()), default=0)
    found = [
        [Piece(tensor=name, first=i * _TILES, shape=(1, _TILES, t.shape[2])) for name, t in tiles.items()]
        for i in range(whole)
    ]
    rest = []
    for name, tensor in tensors.items():
        first = whole * _TILES if name in tiles else 0
        rest.append(Piece(tensor=name, first=first, shape=tuple(tensor[:, first:].shape)))
    return [*found, rest]


def _kept(store: Store, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> Object:
    parts = [tensors[p.tensor][:, p.first : p.first + p.shape[1]].contiguous() for p in pieces]
    data = b"".join(part.view(torch.uint8).numpy().tobytes() if part.numel() else b"" for part in parts)
    return Object(sha256=store.add_object(data), nbytes=len(data), pieces=tuple(pieces))


def _joined(store: Store, path: Path, record: PrefixRecord) -> dict[str, Tensor]:
    """The tensors of a record, every byte of them checked."""
    parts: dict[str, list[Tensor]] = {name: [] for name in record.dtypes}
    for each in record.objects:
        data, at = bytearray(store.read_object(each.sha256, each.nbytes)), 0
        for piece in each.pieces:
            dtype = getattr(torch, record.dtypes.get(piece.tensor, ""), None)
            if not isinstance(dtype, torch.dtype) or any(size < 0 for size in piece.shape) or len(piece.shape) < 2:
                raise _damaged(path, f"it has a piece of {piece.tensor!r}, which it does not describe")
            held = parts[piece.tensor]
            if sum(part.shape[1] for part in held) != piece.first:
                raise _damaged(path, f"its pieces of {piece.tensor!r} do not follow one another")
            count = torch.Size(piece.shape).numel()
            nbytes = count * dtype.itemsize
            if at + nbytes > len(data):
                raise _damaged(path, "its objects are shorter than its pieces")
            flat = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=at) if nbytes else torch.empty(0)
            held.append(flat.clone().view(dtype).view(piece.shape) if nbytes else torch.empty(piece.shape, dtype=dtype))
            at += nbytes
        if at != len(data):
            raise _damaged(path, "its objects are longer than its pieces")
    try:
        return {name: torch.cat(held, 1) if len(held) > 1 else held[0] for name, held in parts.items()}
    except (RuntimeError, IndexError) as error:
        raise _damaged(path, f"its pieces do not make tensors: {error}") from error


def _damaged(path: Path, reason: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged: {reason}", "aatc cache check --repair removes it; then store it again")
