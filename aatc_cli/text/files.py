"""Text files: regular, not compressed, UTF-8, and no larger than memory; all else is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aatc_cli.errors import AatcError

GZIP_MAGIC = b"\x1f\x8b"


def checked_file(location: str, forms: str) -> Path:
    """The path of a file that can hold text; raises `AatcError` for one that is absent, empty or compressed."""
    path = Path(location)
    if os.path.isdir(path):
        raise AatcError(
            f"{path} is a folder, not a text file", f"give one file in it, or hf:{path}:default:train:text for all"
        )
    if not os.path.isfile(path):
        if os.path.lexists(path):
            what = "a link that leads nowhere" if os.path.islink(path) else "a pipe or a device"
            raise AatcError(f"{path} is {what}, not a text file", "write the text into a file: it is read twice")
        raise AatcError(f"there is no text file {path}", f"check the path, or write {forms}")
    with reading(path), open(path, "rb") as handle:
        start = handle.read(len(GZIP_MAGIC))
    if not start:
        raise AatcError(f"the text file {path} is empty", "give a file that holds text")
    if start == GZIP_MAGIC:
        raise AatcError(f"{path} is compressed with gzip", f"decompress it first: gunzip -k {path}")
    return path


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While the block lasts, what cannot be read of ``path``, or does not fit into memory, is an `AatcError`."""
    try:
        yield
    except OSError as error:
        raise AatcError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error
    except MemoryError as error:
        size = os.path.getsize(path)
        problem = f"the text file {path} of {size} bytes does not fit into memory"
        raise AatcError(problem, "give a part of it, or JSON lines, which are read line by line") from error


def decoded(data: bytes, where: str) -> str:
    """``data`` as UTF-8 without a byte order mark; line ends stay as they are."""
    try:
        text = data.decode("utf-8-sig")
    except MemoryError as error:
        problem = f"{where} has {len(data)} bytes, which do not fit into memory as text"
        raise AatcError(problem, "give a part of it, or JSON lines, which are read line by line") from error
    except UnicodeDecodeError as error:
        raise AatcError(
            f"{where} is not UTF-8 text: byte {error.start} cannot be decoded",
            "convert it to UTF-8, for instance with iconv -t UTF-8",
        ) from error
    # English in UTF-16 is valid UTF-8 with a NUL after every letter, and a sparse file is NULs alone
    if "\0" in text:
        raise AatcError(
            f"{where} holds NUL characters: it is UTF-16 or no text at all",
            "convert it to UTF-8, for instance with iconv -f UTF-16 -t UTF-8",
        )
    return text


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON document, or its first line is."""
    for part in (text, text.lstrip().partition("\n")[0]):
        with suppress(ValueError, RecursionError):
            if isinstance(json.loads(part), list | dict):
                return True
    return False
