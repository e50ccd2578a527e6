"""Text that needs no file of the user's and no network: documentation of Python 3.11, and what is made (`text.made`).

The topics came with CPython 3.11.7 (`pydoc_data.topics`); those of other versions differ. Licence:
python_topics.LICENSE.txt.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from aatc_cli.errors import AatcError
from aatc_cli.text.made import KINDS, made_documents

PYTHON_DOCS = "python-docs"
PYTHON_DOCS_TEST = "python-docs-test"
MADE_NAMES = tuple(f"{kind}{part}" for kind in KINDS for part in ("", "-test"))
BUILTIN_NAMES = (PYTHON_DOCS, PYTHON_DOCS_TEST, *MADE_NAMES)
HELD_OUT_EVERY = 5


def builtin_documents(name: str) -> list[str]:
    """The documents of the built-in text ``name``, in the order of their topic names.

    Of the sorted topics every fifth one belongs to ``python-docs-test``, the others to ``python-docs``. All texts are
    the same under every version of Python. Raises `AatcError` for an unknown name.
    """
    if name not in BUILTIN_NAMES:
        raise AatcError(f"there is no built-in text named {name!r}", f"available: {', '.join(BUILTIN_NAMES)}")
    if name in MADE_NAMES:
        return made_documents(name.removesuffix("-test"), test=name.endswith("-test"))
    calibration, test = split_topics(python_topics())
    return calibration if name == PYTHON_DOCS else test


@cache
def python_topics() -> Mapping[str, str]:
    """The topics by name."""
    packed = (files("aatc_cli.text") / "python_topics.json.xz").read_bytes()
    topics: dict[str, str] = json.loads(lzma.decompress(packed))
    return topics


def split_topics(topics: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Split topics by name into documents to calibrate on and documents to test on, with no paragraph in common.

    Many topics are printed again inside a longer one ("class" in "compound"), so apart topics are not yet apart
    texts: a paragraph of a test topic is taken out of every calibration document. Wrapping and indentation do not
    count, and neither does the row of marks under a heading.
    """
    names = sorted(topics)
    test = [topics[name] for name in names[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]]
    held_out = {_words(part) for document in test for part in paragraphs(document)}
    calibration = []
    for index, name in enumerate(names):
        if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1:
            kept = [part for part in paragraphs(topics[name]) if _words(part) not in held_out]
            calibration.append("\n\n".join(kept) + "\n")
    return calibration, test


def paragraphs(document: str) -> list[str]:
    """The parts of ``document`` between blank lines, without empty ones."""
    return [part for part in document.strip("\n").split("\n\n") if part.strip()]


def _words(paragraph: str) -> str:
    return " ".join(word for word in paragraph.split() if len(set(word)) > 1 or len(word) < 4)
