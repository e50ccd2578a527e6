"""How files come to lie on a disk, whole or not at all, and how small ones of ours are read."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from aatc_cli.errors import AatcError

# a manifest of the largest models takes a few hundred KiB
_LARGEST_RECORD = 1 << 26


def read_record(path: Path) -> str:
    """Text of a manifest or of an evaluation.

    Raises `ValueError` when ``path`` is a symbolic link, no regular file, larger than 64 MiB or not UTF-8, and
    `OSError` as the disk does.
    """
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    if not path.is_file():
        raise ValueError("it is not a regular file")
    if path.stat().st_size > _LARGEST_RECORD:
        raise ValueError(f"it is larger than {_LARGEST_RECORD >> 20} MiB")
    return path.read_text(encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all, and flush it to disk; raises `AatcError` as the disk does."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        flush(temporary)
        os.replace(temporary, path)
        _flush_folder(path.parent)
    except BaseException as failure:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(failure, OSError):
            raise unwritable(path, failure) from failure
        raise


def replace_directory(source: Path, target: Path) -> None:
    """Move the finished directory ``source`` to ``target``, replacing what is there; on failure that stays."""
    retired = target.parent / f".{target.name}.old-{os.getpid()}"
    _flush_folder(source)
    try:
        if target.exists():
            os.rename(target, retired)
        os.rename(source, target)
    except BaseException:
        if retired.exists() and not target.exists():
            os.rename(retired, target)
        raise
    # the new one is in its place on the disk before the old one goes
    _flush_folder(target.parent)
    shutil.rmtree(retired, ignore_errors=True)


def unwritable(path: Path, failure: Exception) -> AatcError:
    """The error for something that the disk did not take."""
    return AatcError(f"{path} cannot be written: {failure}", "check the space left on the disk and its permissions")


def flush(path: Path) -> None:
    """Flush the contents of a file to disk; raises `OSError`."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def _flush_folder(path: Path) -> None:
    """Flush the names in a folder to disk, where the system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        # some file systems know no flush of folders
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
