"""The head of a stored chunk: whose it is, which tokens it holds, where every layer lies, and checksums of all of it.

    chunk   = head | exact sinks | layer 0 | layer 1 | ...        each part begins at a multiple of 64 bytes
    head    = fields | length and checksum of every part | checksum of all that

What a reader does not know in full it refuses: there are no warnings, and no part is read before its checksum is.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from aatc_cli.errors import ArtifactError

MAGIC = b"AATCHUNK"
VERSION = 1
ALIGNMENT = 64
# magic, version, type of exact numbers, bytes of the head, parts, tokens, sinks, first position, plan, model, name
_FIELDS = struct.Struct("<8sHHIIIIQ32s32s32s")
_PART = struct.Struct("<II")
_CRC = struct.Struct("<I")
NO_NAME = bytes(32)


class ChunkError(ArtifactError):
    """A stored chunk that must not be used: its tokens are to be computed again."""


@dataclass(frozen=True)
class ChunkHeader:
    """What a chunk says of itself.

    plan, model, name: 32 bytes each; a name is the caller's own, zero where none was given. first: position of the
    first of ``tokens`` tokens, of which ``sinks`` are kept exact as numbers of type ``dtype`` (`pages.TYPES`). parts:
    length and CRC-32 of the sinks, then of every layer.
    """

    plan: bytes
    model: bytes
    name: bytes
    first: int
    tokens: int
    sinks: int
    dtype: int
    parts: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the head."""
        return head_bytes(len(self.parts))

    @property
    def starts(self) -> list[int]:
        """Where every part begins, and where the last one ends."""
        places = [self.nbytes]
        for length, _ in self.parts:
            places.append(places[-1] + aligned(length))
        return places

    def pack(self) -> bytes:
        """The head as bytes."""
        fixed = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.dtype,
            self.nbytes,
            len(self.parts),
            self.tokens,
            self.sinks,
            self.first,
            self.plan,
            self.model,
            self.name,
        )
        body = fixed + b"".join(_PART.pack(*part) for part in self.parts)
        return (body + _CRC.pack(zlib.crc32(body))).ljust(self.nbytes, b"\0")

    @classmethod
    def read(cls, data: memoryview) -> Self:
        """The head of a chunk; raises `ChunkError` for anything but a whole chunk of this version."""
        if len(data) < _FIELDS.size or bytes(data[:8]) != MAGIC:
            raise ChunkError("this is no stored chunk", "compute its tokens again")
        fields = _FIELDS.unpack_from(data)
        if fields[1] != VERSION:
            raise ChunkError(
                f"a stored chunk of version {fields[1]}; this aatc reads version {VERSION}",
                "use the aatc that wrote it, or compute its tokens again",
            )
        size, count = fields[3:5]
        if size != head_bytes(count) or len(data) < size:
            raise damaged("its head is cut short")
        body = _FIELDS.size + count * _PART.size
        if zlib.crc32(data[:body]) != _CRC.unpack_from(data, body)[0] or any(data[body + _CRC.size : size]):
            raise damaged("its head does not match its checksum")
        parts = tuple(_PART.unpack_from(data, _FIELDS.size + index * _PART.size) for index in range(count))
        found = cls(fields[8], fields[9], fields[10], fields[7], fields[5], fields[6], fields[2], parts)
        if len(data) != found.starts[-1]:
            raise damaged(f"it has {len(data)} of {found.starts[-1]} bytes")
        return found

    def require(self, *, plan: bytes, model: bytes, name: bytes | None, tokens: int, first: int, sinks: int) -> None:
        """Raise `ChunkError` naming the first of these that differs; a ``name`` of None is any."""
        pairs: tuple[tuple[str, bytes | int, bytes | int], ...] = (
            ("plan", self.plan, plan),
            ("model", self.model, model),
            ("name", self.name, self.name if name is None else name),
            ("length", self.tokens, tokens),
            ("position", self.first, first),
            ("number of sinks", self.sinks, sinks),
        )
        for what, found, wanted in pairs:
            if found != wanted:
                shown = f": {found:d}, not {wanted:d}" if isinstance(found, int) and isinstance(wanted, int) else ""
                raise ChunkError(f"a stored chunk is of another {what}{shown}", "compute its tokens again")

    def require_sizes(self, layers: int, sinks: int | None, sizes: list[int] | None) -> None:
        """Raise `ChunkError` unless there are parts of ``layers`` layers, with these bytes of sinks and of every layer.

        sinks of None: of numbers of no known type, which is wrong. sizes of None: of a code of variable rate.
        """
        lengths = [length for length, _ in self.parts]
        known = len(lengths) == layers + 1 and lengths[0] == sinks
        if not known or (sizes is not None and lengths[1:] != sizes):
            raise ChunkError("a stored chunk has parts of another size than its plan", "compute its tokens again")

    def require_parts(self, data: memoryview) -> None:
        """Raise `ChunkError` naming the first part that does not match its checksum."""
        for index, (start, (length, crc)) in enumerate(zip(self.starts[:-1], self.parts, strict=True)):
            if zlib.crc32(data[start : start + length]) != crc:
                what = f"layer {index - 1} does not match its" if index else "its sinks do not match their"
                raise damaged(f"{what} checksum")


def aligned(length: int) -> int:
    """``length`` rounded up to where the next part begins."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def head_bytes(parts: int) -> int:
    """Bytes of a head that lists so many parts."""
    return aligned(_FIELDS.size + parts * _PART.size + _CRC.size)


def assemble(header: ChunkHeader, parts: Sequence[bytes | memoryview]) -> bytes:
    """A whole chunk; ``header`` has the lengths and checksums of ``parts``."""
    pieces: list[bytes | memoryview] = [header.pack()]
    for part in parts:
        pieces += [part, bytes(aligned(len(part)) - len(part))]
    return b"".join(pieces)


def measured(parts: Sequence[bytes | memoryview]) -> tuple[tuple[int, int], ...]:
    """Length and checksum of every part."""
    return tuple((len(part), zlib.crc32(part)) for part in parts)


def damaged(reason: str) -> ChunkError:
    """The error for a chunk that is not what was written."""
    return ChunkError(f"a stored chunk is damaged: {reason}", "compute its tokens again")
