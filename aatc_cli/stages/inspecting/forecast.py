"""--dry-run: what a stage would read and write, and what it would take, found out without doing any of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aatc_cli.console import duration
from aatc_cli.stages.inspecting.facts import Inspection, Table


@dataclass(frozen=True)
class Piece:
    """A file or folder that would be read or written, with its bytes where they are known."""

    path: str
    bytes: int | None
    note: str = ""


@dataclass(frozen=True)
class Forecast:
    """Of one stage. seconds: a rough time; memory: bytes in use at once beside what runs already."""

    stage: str
    reads: list[Piece] = field(default_factory=list)
    writes: list[Piece] = field(default_factory=list)
    seconds: float | None = None
    memory: int | None = None
    free: int | None = None
    notes: list[str] = field(default_factory=list)

    def inspection(self) -> Inspection:
        """As data for programs and a table for people."""
        rows = [[what, piece.path, _size(piece.bytes), piece.note] for what, piece in self._pieces()]
        if self.seconds is not None:
            rows.append(["time", f"about {duration(max(self.seconds, 1))}", "", ""])
        if self.memory is not None:
            fits = "" if self.free is None else "fits" if self.memory <= self.free else "does NOT fit"
            rows.append(["memory", fits, _size(self.memory), ""])
        rows += [["note", "", "", note] for note in self.notes]
        columns = ["what", "where", "bytes", "about it"]
        data: dict[str, Any] = {
            "stage": self.stage,
            "reads": [{"path": piece.path, "bytes": piece.bytes} for piece in self.reads],
            "writes": [{"path": piece.path, "bytes": piece.bytes, "state": piece.note} for piece in self.writes],
            "seconds": None if self.seconds is None else float(f"{self.seconds:.3g}"),
            "bytes_memory": self.memory,
            "bytes_free": self.free,
            "notes": self.notes,
        }
        return Inspection(data, [Table(f"{self.stage}, dry run: nothing was written", columns, rows)])

    def _pieces(self) -> list[tuple[str, Piece]]:
        return [("reads", piece) for piece in self.reads] + [("writes", piece) for piece in self.writes]


def state_of(path: Path) -> str:
    """What a stage would find in the place it writes to."""
    return "there already: compared, kept or refused" if path.exists() else "new"


def on_disk(path: Path) -> int | None:
    """Bytes of a file, or of all files of a folder; None where there is nothing."""
    if path.is_file():
        return path.stat().st_size
    if not path.is_dir():
        return None
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _size(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
