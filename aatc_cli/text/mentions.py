"""Names and numbers of a text that are mentioned once and once more, far behind: where a reader has to remember."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Kind = Literal["name", "number"]

_WORD = re.compile(r"\d[\d.,:]*\d|[^\W\d_][\w'\u2019-]*\w")
# what a word stands behind that may be written large for its place alone
_OPENING = tuple(".!?:;\"\u201c\u201d\u2018'(=*#-\u2013\u2014")
# letters of a name, so that initials and I are none
_LETTERS = 3


@dataclass(frozen=True)
class Mention:
    """A word of ``size`` tokens that stands at ``first`` and, for the second time in the text, at ``again``."""

    first: int
    again: int
    size: int
    kind: Kind

    @property
    def gap(self) -> int:
        """Tokens between the two."""
        return self.again - self.first - self.size


def mentions(tokens: Sequence[int], decode: Callable[[list[int]], str], least: int) -> list[Mention]:
    """Second mentions of names and numbers at least ``least`` tokens behind the first, in their order.

    A name begins with a capital letter where none need be; a number has two digits or more. Both mentions are the same
    tokens, and the word stands nowhere else before the second.
    """
    pieces = _pieces(tokens, decode)
    ends = list(accumulate(len(piece) for piece in pieces))
    text = "".join(pieces)
    before: dict[str, list[tuple[int, int]]] = {}
    found = []
    for match in _WORD.finditer(text):
        span = _tokens_of(match.start(), match.end(), ends, text)
        kind = _kind(match, text)
        known = before.setdefault(match[0].casefold(), [])
        if span is not None and kind is not None and len(known) == 1:
            first, size = known[0]
            place = Mention(first, span[0], span[1] - span[0], kind)
            if size == place.size and first > 0 and place.gap >= least and _alike(tokens, place):
                found.append(place)
        known.append((-1, 0) if span is None else (span[0], span[1] - span[0]))
    return found


def _pieces(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of every token; by pairs, since some tokenizers leave out the blank before a first one."""
    pieces, known = [], dict[tuple[int, int], str]()
    for before, token in zip([None, *tokens], tokens, strict=False):
        pair = (-1 if before is None else before, token)
        if pair not in known:
            known[pair] = decode([token]) if before is None else decode([before, token])[len(decode([before])) :]
        pieces.append(known[pair])
    return pieces


def _tokens_of(start: int, end: int, ends: list[int], text: str) -> tuple[int, int] | None:
    """The tokens [begin, stop) of a word; None where one of them holds more than it and white space before it."""
    begin, last = bisect_right(ends, start), bisect_left(ends, end)
    opens = ends[begin - 1] if begin else 0
    if ends[last] != end or text[opens:start].strip():
        return None
    return begin, last + 1


def _kind(match: re.Match[str], text: str) -> Kind | None:
    word = match[0]
    if word[0].isdigit():
        return "number"
    ahead = text[: match.start()].rstrip(" ")
    opening = not ahead or ahead.endswith(("\n", *_OPENING))
    return "name" if word[0].isupper() and len(word) >= _LETTERS and not opening else None


def _alike(tokens: Sequence[int], place: Mention) -> bool:
    first, again = (list(tokens[start : start + place.size]) for start in (place.first, place.again))
    return first == again
