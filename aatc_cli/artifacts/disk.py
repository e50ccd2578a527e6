"""Files of a run: written whole or not at all under names that nobody guesses, read without following links."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from aatc_cli.errors import AatcError, ArtifactError

# a manifest of the largest models takes a few hundred KiB
_LARGEST_RECORD = 1 << 26
# what a writer that was killed may have left: half-written, or moved aside for it; the mark and the random digits tell
# them from files of a user
LEFT_BEHIND = re.compile(r"\.(?P<name>.+)\.(?P<what>tmp|old)-aatc-[0-9a-f]{16}")
_CLOSED = os.O_CLOEXEC | os.O_NOFOLLOW


def temporary_beside(path: Path, what: Literal["tmp", "old"]) -> Path:
    """A hidden name beside ``path`` that nothing has: for what is to become it, or for what it was."""
    return path.with_name(f".{path.name}.{what}-aatc-{secrets.token_hex(8)}")


def within(root: Path, path: Path) -> Path:
    """``path``; raises `ArtifactError` when it is not below ``root``, or a part of it there is a symbolic link.

    How ``root`` itself is reached is the user's affair.
    """
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ("..",)
    if ".." in parts:
        raise ArtifactError(f"{path} leads out of the run directory {root}", "name it by an option")
    place = root
    for part in parts:
        place = place / part
        if place.is_symlink():
            problem = f"{place} is a symbolic link, which may lead out of the run directory {root}"
            raise ArtifactError(problem, "put the folder itself in its place, or name it by an option")
    return path


def read_record(path: Path) -> str:
    """Text of a manifest or of an evaluation.

    Raises `ValueError` when ``path`` is a symbolic link, no regular file, larger than 64 MiB or not UTF-8, and
    `OSError` as the disk does.
    """
    if path.is_symlink():
        raise ValueError("it is a symbolic link")
    # a pipe is opened without waiting for who writes into it
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _CLOSED)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > _LARGEST_RECORD:
            raise ValueError(f"it is larger than {_LARGEST_RECORD >> 20} MiB")
        return file.read(_LARGEST_RECORD).decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` whole or not at all, and flush it to disk; raises `AatcError` as the disk does."""
    temporary = temporary_beside(path, "tmp")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED, 0o666)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(handle)
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
    retired = temporary_beside(target, "old")
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
    reason = getattr(failure, "strerror", None) or failure
    return AatcError(f"{path} cannot be written: {reason}", "check the space left on the disk and its permissions")


def require_writable(folder: Path) -> None:
    """Raise `AatcError` where ``folder`` cannot be written, or not be made: asked before hours of work go into it."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        raise unwritable(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


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
