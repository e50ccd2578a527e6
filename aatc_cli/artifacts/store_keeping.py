"""Keeping a store: its size, what is wrong in it, and what goes when there is too much."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aatc_cli.artifacts.disk import LEFT_BEHIND
from aatc_cli.artifacts.store import Store, read_bytes
from aatc_cli.errors import AatcError

# after so many seconds no writer of a chunk is still at it
_ABANDONED = 3600.0
# the objects that a record names; raises for a record that is damaged
ObjectsOf = Callable[[Path], list[str]]
# raises `AatcError` for bytes that are no whole chunk
CheckChunk = Callable[[bytes], None]


@dataclass(frozen=True)
class Kept:
    """What a store holds: prefixes, objects, chunks, and the bytes of all its files."""

    prefixes: int
    objects: int
    chunks: int
    bytes: int


@dataclass(frozen=True)
class Collected:
    """What the collector took, and the bytes that are left."""

    prefixes: int
    objects: int
    chunks: int
    freed: int
    bytes: int


def kept(store: Store) -> Kept:
    """What the store holds now."""
    prefixes, objects, chunks = store.all_prefixes(), store.all_objects(), store.all_chunks()
    return Kept(len(prefixes), len(objects), len(chunks), sum(map(_size, (*prefixes, *objects, *chunks))))


def problems(store: Store, objects_of: ObjectsOf, check_chunk: CheckChunk) -> dict[Path, str]:
    """What is wrong, by file: records and chunks that are damaged, objects that are not what their names say."""
    found: dict[Path, str] = {}
    for path in store.all_objects():
        data = read_bytes(path)
        if data is not None and hashlib.sha256(data).hexdigest() != path.name:
            found[path] = "it is not what its name says"
    for path in store.all_prefixes():
        try:
            missing = [name for name in objects_of(path) if not store.object_path(name).is_file()]
        except AatcError as error:
            found[path] = error.message
            continue
        bad = [name for name in objects_of(path) if store.object_path(name) in found]
        if missing or bad:
            found[path] = f"{len(missing) + len(bad)} of its objects are missing or damaged"
    for path in store.all_chunks():
        try:
            check_chunk(read_bytes(path) or b"")
        except AatcError as error:
            found[path] = error.message
    return found


def remove(paths: Iterable[Path]) -> None:
    """Remove files that may be gone already."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def collect_garbage(store: Store, limit: int | None, objects_of: ObjectsOf) -> Collected:
    """Remove what no record names and what killed writers left; then the least recently used, down to ``limit`` bytes.

    To be called while the store is held for writing. Records that are damaged go too.
    """
    before = kept(store)
    named: dict[Path, set[str]] = {}
    for path in store.all_prefixes():
        try:
            named[path] = set(objects_of(path))
        except AatcError:
            remove([path])
    _sweep(store)
    total = _drop_unnamed(store, named)
    if limit is not None:
        users: dict[str, int] = {}
        for names in named.values():
            for name in names:
                users[name] = users.get(name, 0) + 1
        for path in sorted([*named, *store.all_chunks()], key=_used):
            if total <= limit:
                break
            total -= _size(path)
            gone = [path]
            for name in named.pop(path, ()):
                users[name] -= 1
                if not users[name]:
                    gone.append(store.object_path(name))
                    total -= _size(gone[-1])
            # the record first: one that names what is not there would be a lie
            remove(gone)
    after = kept(store)
    return Collected(
        before.prefixes - after.prefixes,
        before.objects - after.objects,
        before.chunks - after.chunks,
        before.bytes - after.bytes,
        after.bytes,
    )


def _drop_unnamed(store: Store, named: dict[Path, set[str]]) -> int:
    """Remove objects that no record names; the bytes that are left."""
    wanted = {name for names in named.values() for name in names}
    remove(path for path in store.all_objects() if path.name not in wanted)
    return kept(store).bytes


def _sweep(store: Store) -> None:
    """Remove what writers that were killed left half-written."""
    now = time.time()
    for path in store.folder.rglob(".*"):
        found = LEFT_BEHIND.fullmatch(path.name)
        # writers of chunks hold no lock: theirs may still be written
        if found and (path.is_relative_to(store.folder / "objects") or now - _used(path) > _ABANDONED):
            remove([path])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
