"""Chunks of an engine in a store: named by the engine's own hashes, read back or told to be missing, never wrong."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

from aatc_cli.artifacts.store import Store
from aatc_cli.artifacts.store_keeping import collect_garbage, kept
from aatc_cli.config import parse_size
from aatc_cli.console import say
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.pages import Pages
from aatc_cli.runtime.stored.prefixes import objects_of
from aatc_cli.serve.opening import PluginSettings

# a full store is collected down to this share, so that not every chunk collects again
_ROOM = 0.9


@dataclass
class EngineChunks:
    """The chunks of one codec in a store. ``salt``: what tells ranks of one engine apart, for all names.

    What cannot be written or read is a miss: the engine computes those tokens. Every kind of trouble is said once.
    """

    codec: StoredCodec
    store: Store
    limit: int | None
    salt: str
    _size: int = 0
    _told: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, codec: StoredCodec, settings: PluginSettings, salt: str) -> EngineChunks:
        """In the store that the settings name; raises `UsageError` where they name none."""
        if settings.store is None:
            raise UsageError("this plugin keeps chunks in a store, and none was named", 'give "store": a folder')
        store = Store(Path(settings.store), create=True)
        limit = None if settings.limit is None else parse_size(settings.limit)
        return cls(codec, store, limit, salt, kept(store).bytes)

    def name(self, key: str | bytes) -> bytes:
        """The name of a chunk, 32 bytes, of the engine's key for its tokens."""
        data = key if isinstance(key, bytes) else key.encode()
        return hashlib.sha256(self.salt.encode() + b"\0" + data).digest()

    def has(self, key: str | bytes) -> bool:
        """Whether a chunk of this key is there; whether it is sound, `get` tells."""
        return self.store.chunk_path(self.codec.digest, self.name(key).hex()).is_file()

    def put(self, key: str | bytes, pages: Pages, first: int) -> bool:
        """Keep pages; whether they are kept."""
        name = self.name(key)
        try:
            data = self.codec.encode(pages, first, name=name)
            self._make_room(len(data))
            self.store.write_chunk(self.codec.digest, name.hex(), data)
        except AatcError as error:
            self._tell(error)
            return False
        return True

    def get(self, key: str | bytes, first: int, dtype: torch.dtype) -> Pages | None:
        """The pages of a key at a position, or None: absent, damaged, of another plan, model, position or version."""
        name = self.name(key)
        try:
            data = self.store.read_chunk(self.codec.digest, name.hex())
            return None if data is None else self.codec.decode(data, first, dtype, name)
        except AatcError as error:
            self._tell(error)
            return None

    def _make_room(self, more: int) -> None:
        if self.limit is None:
            return
        with self._lock:
            self._size += more
            if self._size <= self.limit:
                return
            with self.store.writing():
                done = collect_garbage(self.store, int(self.limit * _ROOM) - more, objects_of)
            self._size = done.bytes + more

    def _tell(self, error: AatcError) -> None:
        if error.message not in self._told:
            self._told.add(error.message)
            say(f"aatc: {error.message}; its tokens are computed again")
