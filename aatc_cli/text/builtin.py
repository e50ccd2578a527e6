"""Text that needs no file and no network: the Python documentation topics that come with the interpreter."""

from __future__ import annotations

from collections.abc import Mapping

from aatc_cli.errors import AatcError

PYTHON_DOCS = "python-docs"
PYTHON_DOCS_TEST = "python-docs-test"
BUILTIN_NAMES = (PYTHON_DOCS, PYTHON_DOCS_TEST)
HELD_OUT_EVERY = 5


def builtin_documents(name: str) -> list[str]:
    """The documents of the built-in text ``name``, in the order of their topic names.

    Of the sorted topics every fifth one belongs to ``python-docs-test``, the others to ``python-docs``. The texts
    differ a little between Python versions, which their recorded hash shows. Raises `AatcError` for an unknown name,
    or when the interpreter was installed without the topics.
    """
    if name not in BUILTIN_NAMES:
        raise AatcError(f"there is no built-in text named {name!r}", f"available: {', '.join(BUILTIN_NAMES)}")
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise AatcError(
            "this Python has no documentation topics (pydoc_data is missing)",
            "give a text file instead of a built-in text",
        ) from error
    calibration, test = split_topics(topics)
    return calibration if name == PYTHON_DOCS else test


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
