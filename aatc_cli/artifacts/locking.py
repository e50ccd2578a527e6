"""One writer at a time: locks that a killed process cannot leave behind, and what it left half-written."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aatc_cli.errors import AatcError

LOCK = ".lock"


@contextmanager
def locked(folder: Path, name: str = LOCK, *, wait: bool) -> Iterator[None]:
    """Hold ``folder`` for writing while the block lasts, by a lock on the file ``name`` in it; it is made if absent.

    The system drops the lock with the process that holds it, however that ends; the file itself means nothing.
    Where another process holds it, ``wait`` for that one, or raise `AatcError` naming it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            pid = handle.read().strip()
            owner = f"process {pid}" if pid else "another process"
            raise AatcError(
                f"{folder} is being written by {owner}", "wait for it, or use another --run directory"
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        yield


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what a killed process left half-written, under one ``name`` or any; bring back what it had moved aside.

    To be called under the lock that all writers of these names hold.
    """
    what = "*" if name is None else glob.escape(name)
    for leftover in [*folder.glob(f".{what}.tmp-*"), *folder.glob(f".{what}.old-*")]:
        target = folder / leftover.name[1:].rsplit(".", 1)[0]
        if ".old-" in leftover.name and not target.exists():
            os.rename(leftover, target)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
