"""What is remembered of files that were hashed: outside every run, by all that the system says of a file.

A file that was written within the last seconds is not remembered, since it could change again without its times
changing. Nothing here can fail: what cannot be kept or read is measured again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Self

Hashes = list[list[Any]]
"""One entry per tensor: name, dtype, shape, sha256."""

# coarse clocks of file systems count seconds, or two
_SETTLED = 4.0
_FORM = 1
_memory: dict[Stamp, Hashes] = {}


@dataclass(frozen=True)
class Stamp:
    """A file by what changes with its content: times in nanoseconds. ``changed`` cannot be set back by a program."""

    path: str
    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The stamp of the file that ``path`` leads to; raises `OSError`."""
        real = path.resolve()
        found = real.stat()
        return cls(str(real), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether the file was last written long enough ago for its times to tell."""
        return max(self.modified, self.changed) / 1e9 < time.time() - _SETTLED


def recall(stamp: Stamp) -> Hashes | None:
    """What was remembered of exactly this file, or None."""
    if stamp in _memory:
        return _memory[stamp]
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        record = json.loads(_place(folder, stamp).read_text("utf-8"))
        hashes: Hashes = record["hashes"]
        if record["form"] == _FORM and record["file"] == list(astuple(stamp)) and record["check"] == _check(record):
            _memory[stamp] = hashes
            return hashes
    return None


def remember(stamp: Stamp, hashes: Hashes) -> None:
    """Keep the hashes of a file that is settled, for this process and, where a folder can be written, for later."""
    if not stamp.settled:
        return
    _memory[stamp] = hashes
    folder = cache_folder()
    if folder is None:
        return
    record: dict[str, Any] = {"form": _FORM, "file": list(astuple(stamp)), "hashes": hashes}
    with suppress(OSError, ValueError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".new-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(record | {"check": _check(record)}, file)
            os.replace(name, _place(folder, stamp))
        except BaseException:
            os.unlink(name)
            raise


def cache_folder() -> Path | None:
    """``$XDG_CACHE_HOME/aatc/weights``, by default below ``~/.cache``; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named, "aatc", "weights")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "aatc", "weights") if os.path.isabs(home) else None


def _place(folder: Path, stamp: Stamp) -> Path:
    return folder / f"{hashlib.sha256(os.fsencode(stamp.path)).hexdigest()[:32]}.json"


def _check(record: dict[str, Any]) -> str:
    """sha256 of a record but its own: a damaged one must not name another model."""
    text = json.dumps([record["form"], record["file"], record["hashes"]], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
