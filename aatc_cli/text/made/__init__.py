"""Text of five kinds that needs no file: code, tables, digits, names, other languages; made, the same every time.

Every kind is a function from a number to a document. Documents of calibration and of test have other numbers, and what
is drawn in them is drawn anew, so that they share their form and not their words.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from aatc_cli.text.made.code import code_document
from aatc_cli.text.made.digits import digits_document
from aatc_cli.text.made.languages import languages_document
from aatc_cli.text.made.names import names_document
from aatc_cli.text.made.tables import tables_document

KINDS: dict[str, Callable[[Random], str]] = {
    "code": code_document,
    "tables": tables_document,
    "digits": digits_document,
    "names": names_document,
    "languages": languages_document,
}
# documents of each part; of about two thousand characters
_CALIBRATION, _TEST = 320, 64


def made_documents(kind: str, *, test: bool) -> list[str]:
    """The documents of one kind, to test on or to calibrate on."""
    count, part = (_TEST, "test") if test else (_CALIBRATION, "calibration")
    # a string seeds through a hash that is the same on every machine and version
    return [KINDS[kind](Random(f"{kind} {part} {number}")) for number in range(count)]
