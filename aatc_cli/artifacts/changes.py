"""What changed between two JSON documents: every field with both its values, and the same in words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# what is shown of a hash, and of any other value
_DIGITS, _LONGEST = 12, 60
_HASH = re.compile(r"([a-z0-9]+:)?[0-9a-f]{40,}")


def changes(old: object, new: object, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path, old and new value of every leaf that differs; lists of another length as a whole."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from changes(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from changes(a, b, f"{where}[{index}]")
    elif old != new:
        yield where, old, new


def changes_in_words(old: object, new: object) -> list[str]:
    """Each change as ``plan was "a", now "b"``; hashes by their first digits, other long values cut.

    Tuples, which JSON does not know, are the lists they are written as.
    """
    return [
        f"{where} was of an earlier aatc, whose hash did not cover all of it"
        if _older_hash(where, a, b)
        else f"{where} was {_short(a)}, now {_short(b)}"
        for where, a, b in changes(json.loads(json.dumps(old)), json.loads(json.dumps(new)))
    ]


def _older_hash(where: str, old: object, new: object) -> bool:
    """Whether one is a hash that names its kind (``tensors:...``) and the other of before hashes did."""
    hashes = where.rpartition(".")[2] in ("weights_fingerprint", "tokenizer_hash")
    return hashes and (":" in str(old)) != (":" in str(new))


def _short(value: object) -> str:
    if isinstance(value, str) and (found := _HASH.fullmatch(value)):
        return f'"{value[: len(found[1] or "") + _DIGITS]}..."'
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
