"""Store: a folder of prefixes and chunks, content-addressed, for several processes at once.

    store.json                        what the folder is
    objects/ab/abcd...                bytes under their sha256
    prefixes/SPACE/COUNT-HASH.json    a prefix of COUNT tokens: which objects it is made of
    chunks/SPACE/ab/NAME              chunks of engines, which have checksums of their own

A space is one plan on one model. Files are written under another name and renamed, so a reader sees a whole file or
none, whatever happens to the writer. Writers of prefixes and the collector take turns by a lock; writers of chunks need
none. Reading needs no lock: what the collector took meanwhile is absent, which is a miss.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from aatc_cli.artifacts.disk import read_record, temporary_beside, unwritable, write_text
from aatc_cli.artifacts.locking import locked
from aatc_cli.errors import AatcError, ArtifactError

ABOUT = "store.json"
_VERSION = 1
_HEX = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"(?P<count>[0-9]{1,12})-(?P<tokens>[0-9a-f]{64})\.json")
_SPACE = re.compile(r"[0-9a-f]{64}")


class Store:
    """The store in ``folder``; with ``create`` it is made where there is nothing.

    Raises `ArtifactError` for another folder or a store of another version.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        about = folder / ABOUT
        if not about.is_file():
            if not create:
                raise ArtifactError(f"there is no store at {folder}", "aatc cache put makes one")
            check_place(folder)
            self._begin(about)
        try:
            version = json.loads(read_record(about))
        except (OSError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{about} cannot be read: {error}", "give the folder of a store") from error
        if version != {"kind": "store", "schema_version": _VERSION}:
            raise ArtifactError(
                f"{folder} is no store of version {_VERSION}, which this aatc reads", "use the aatc that made it"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store for writing prefixes or for collecting, after whoever does now."""
        try:
            with locked(self.folder, wait=True):
                yield
        except OSError as failure:
            raise unwritable(self.folder, failure) from failure

    def add_object(self, data: bytes | memoryview) -> str:
        """Keep ``data`` and give its sha256; raises `AatcError` when the disk does not take it."""
        name = hashlib.sha256(data).hexdigest()
        path = self.object_path(name)
        # the same bytes are there already, unless a disk lost some of them
        if not path.is_file() or path.stat().st_size != len(data):
            write_bytes(path, data, flush=True)
        return name

    def object_path(self, name: str) -> Path:
        """Where the object of a sha256 lies."""
        return self.folder / "objects" / name[:2] / _named(name)

    def read_object(self, name: str, nbytes: int) -> bytes:
        """The object ``name``; raises `ArtifactError` for one that is absent or not what its name says."""
        path = self.object_path(name)
        data = read_bytes(path)
        if data is None:
            raise ArtifactError(f"{path} is missing", "store the prefix again")
        if len(data) != nbytes or hashlib.sha256(data).hexdigest() != name:
            raise ArtifactError(
                f"{path} is damaged: it is not what its name says", "aatc cache check --repair removes it"
            )
        return data

    def write_prefix(self, space: str, tokens: Sequence[int], text: str) -> Path:
        """Write the record of a prefix, after its objects; replaces one of the same tokens."""
        path = self.prefix_path(space, len(tokens), tokens_digest(tokens))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
        return path

    def prefix_path(self, space: str, count: int, digest: str) -> Path:
        """Where the record of a prefix lies."""
        return self.folder / "prefixes" / _named(space) / f"{count}-{_named(digest)}.json"

    def prefixes_of(self, space: str, tokens: Sequence[int]) -> list[Path]:
        """Records of prefixes of ``tokens`` in a space, the longest first."""
        folder = self.folder / "prefixes" / _named(space)
        found = []
        for path in folder.iterdir() if folder.is_dir() else []:
            match = _PREFIX.fullmatch(path.name)
            if match and int(match["count"]) <= len(tokens):
                found.append((int(match["count"]), match["tokens"], path))
        digests = {count: tokens_digest(tokens[:count]) for count in {count for count, _, _ in found}}
        return [path for count, digest, path in sorted(found, reverse=True) if digests[count] == digest]

    def all_prefixes(self) -> list[Path]:
        """Records of all prefixes."""
        return sorted(path for path in (self.folder / "prefixes").glob("*/*.json") if _PREFIX.fullmatch(path.name))

    def all_objects(self) -> list[Path]:
        """All objects."""
        return sorted(path for path in (self.folder / "objects").glob("??/*") if _HEX.fullmatch(path.name))

    def all_chunks(self) -> list[Path]:
        """All chunks of engines."""
        return sorted(path for path in (self.folder / "chunks").glob("*/??/*") if _HEX.fullmatch(path.name))

    def chunk_path(self, space: str, name: str) -> Path:
        """Where the chunk of a name, 64 hex digits, lies."""
        return self.folder / "chunks" / _named(space) / name[:2] / _named(name)

    def write_chunk(self, space: str, name: str, data: bytes) -> None:
        """Keep a chunk; raises `AatcError` when the disk does not take it."""
        # not flushed: a chunk that a power cut tore is found by its checksums, and computed again
        write_bytes(self.chunk_path(space, name), data, flush=False)

    def read_chunk(self, space: str, name: str) -> bytes | None:
        """A chunk, or None where there is none."""
        path = self.chunk_path(space, name)
        data = read_bytes(path)
        if data is not None:
            touch(path)
        return data

    def _begin(self, about: Path) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise unwritable(self.folder, failure) from failure
        write_text(about, json.dumps({"kind": "store", "schema_version": _VERSION}) + "\n")


def check_place(folder: Path) -> None:
    """Raise `ArtifactError` where there is something, and no store, so that none can be made there."""
    taken = folder.exists() and (not folder.is_dir() or _strangers(folder))
    if taken and not (folder / ABOUT).is_file():
        raise ArtifactError(f"{folder} is there and no store", "give a folder that does not exist yet")


def tokens_digest(tokens: Sequence[int]) -> str:
    """sha256 of token ids as little-endian words of eight bytes."""
    return hashlib.sha256(b"".join(int(token).to_bytes(8, "little") for token in tokens)).hexdigest()


def write_bytes(path: Path, data: bytes | memoryview, *, flush: bool) -> None:
    """Write ``data`` to ``path`` whole or not at all; raises `AatcError` as the disk does."""
    temporary = temporary_beside(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as failure:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(failure, OSError):
            raise unwritable(path, failure) from failure
        raise


def read_bytes(path: Path) -> bytes | None:
    """The content of a regular file, None where there is none; raises `AatcError` where it cannot be read."""
    if path.is_symlink():
        raise ArtifactError(f"{path} is a symbolic link", "remove it")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AatcError(f"{path} cannot be read: {error}", "check the permissions of the store") from error


def touch(path: Path) -> None:
    """Mark a file as used now, for the collector; a store that cannot be written stays as it is."""
    with suppress(OSError):
        os.utime(path)


def _named(name: str) -> str:
    if not _SPACE.fullmatch(name):
        raise ArtifactError(f"{name!r} names nothing in a store", "use 64 hex digits")
    return name


def _strangers(folder: Path) -> bool:
    """Whether anything but the lock of a store lies in a folder."""
    return any(not path.name.startswith(".") for path in folder.iterdir())
