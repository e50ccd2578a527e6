"""Prefixes in chunks in a store: every whole chunk of a text under the hash of all its tokens up to the chunk's end.

So texts that begin alike share chunks, and the longest stored prefix is found by asking for one chunk after another.
Pages are kept in 16 bits. What is damaged, or of another plan or model, is as absent as what was never stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aatc_cli.artifacts.store import Store, tokens_digest
from aatc_cli.errors import AatcError
from aatc_cli.runtime.stored.codec import StoredCodec
from aatc_cli.runtime.stored.pages import Pages


def require_chunk(tokens: int, step: int) -> None:
    """Raise `AatcError` for a text of so few tokens that it has no whole chunk of ``step``."""
    if tokens < step:
        raise AatcError(f"{tokens} tokens are no whole chunk of {step}", "store a longer text, or no chunks")


@dataclass(frozen=True)
class ChunkedPrefixes:
    """The chunks of texts of one codec in a store."""

    store: Store
    codec: StoredCodec

    def names(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of all whole chunks of a text, 32 bytes each."""
        step = self.codec.tokens
        ends = range(step, len(tokens) + 1, step)
        return [hashlib.sha256(f"text {tokens_digest(tokens[:end])}".encode()).digest() for end in ends]

    def missing(self, tokens: Sequence[int]) -> int:
        """How many whole chunks of a text are not there."""
        paths = [self.store.chunk_path(self.codec.digest, name.hex()) for name in self.names(tokens)]
        return sum(not path.is_file() for path in paths)

    def put(self, pages: Pages, tokens: Sequence[int]) -> int:
        """Keep the whole chunks of a text, whose ``pages`` begin with it; the bytes of all of them.

        Raises `AatcError` for a text without a whole chunk, or a full disk.
        """
        names = self.names(tokens)
        require_chunk(len(tokens), self.codec.tokens)
        whole = pages.part(0, len(names) * self.codec.tokens)
        chunks = self.codec.encode_run(whole, 0, names=names)
        for name, data in zip(names, chunks, strict=True):
            self.store.write_chunk(self.codec.digest, name.hex(), data)
        return sum(map(len, chunks))

    def size(self, tokens: Sequence[int]) -> int:
        """Bytes of the chunks of a text that are there."""
        paths = [self.store.chunk_path(self.codec.digest, name.hex()) for name in self.names(tokens)]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def find(self, tokens: Sequence[int], dtype: torch.dtype) -> Pages | None:
        """Pages of the longest stored prefix of a text, of whole chunks that are sound; None where there is none."""
        held: list[bytes] = []
        names = self.names(tokens)
        for index, name in enumerate(names):
            try:
                data = self.store.read_chunk(self.codec.digest, name.hex())
                if data is None:
                    break
                header = self.codec.checked(memoryview(data), index * self.codec.tokens, name)
            except AatcError:
                break
            assert header.tokens == self.codec.tokens
            held.append(data)
        return self.codec.decode_run(held, 0, dtype, names[: len(held)]) if held else None
