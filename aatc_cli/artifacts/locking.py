"""One writer at a time: locks that a killed process cannot leave behind, and what it left half-written."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aatc_cli.artifacts.disk import LEFT_BEHIND, unwritable
from aatc_cli.errors import AatcError

LOCK = ".lock"
# of the number of a process, all that we write into a lock
_DIGITS = 20


@contextmanager
def locked(folder: Path, name: str = LOCK, *, wait: bool) -> Iterator[None]:
    """Hold ``folder`` for writing while the block lasts, by a lock on the file ``name`` in it; it is made if absent.

    The system drops the lock with the process that holds it, however that ends; the file itself means nothing.
    Where another process holds it, ``wait`` for that one, or raise `AatcError` naming it. Raises `AatcError` as well
    for something else in the place of the lock, which is left as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = _open_lock(folder, name)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(handle, _DIGITS, 0).decode("ascii", "replace").strip()
            owner = f"process {pid}" if pid else "another process"
            raise AatcError(
                f"{folder} is being written by {owner}", "wait for it, or use another --run directory"
            ) from error
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        except OSError as failure:
            raise unwritable(folder, failure) from failure
        yield
    finally:
        os.close(handle)


def _open_lock(folder: Path, name: str) -> int:
    """The lock file, opened for writing: a regular file with one name, and no content but the number of a process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(folder / name, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_lock(folder / name) from error
        raise
    found = os.fstat(handle)
    content = os.pread(handle, _DIGITS + 1, 0) if stat.S_ISREG(found.st_mode) else b"?"
    if found.st_nlink != 1 or len(content) > _DIGITS or not (content.isdigit() or not content):
        os.close(handle)
        raise _no_lock(folder / name)
    return handle


def _no_lock(path: Path) -> AatcError:
    problem = f"{path} is not a lock of aatc, and in the place of one"
    return AatcError(problem, "move it away, or use another --run directory")


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what a killed process left half-written, under one ``name`` or any; bring back what it had moved aside.

    To be called under the lock that all writers of these names hold.
    """
    for leftover in sorted(folder.iterdir()) if folder.is_dir() else []:
        found = LEFT_BEHIND.fullmatch(leftover.name)
        if found is None or (name is not None and found["name"] != name):
            continue
        target = folder / found["name"]
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink(missing_ok=True)
        elif found["what"] == "old" and not target.exists():
            os.rename(leftover, target)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
