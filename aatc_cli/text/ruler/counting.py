"""Aggregation: the most common words of a numbered list, and the most frequent words of a coded text."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from random import Random

from aatc_cli.text.ruler.prompt import Prompt

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
CODED = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

_ANSWERS = 10
# the fewest words: as many common as rare ones; and a coded text in which ranks 4 and 5 are sure to differ in number
LEAST_COMMON = 2 * _ANSWERS
LEAST_CODED = 74
# below this context RULER takes shorter lists, in which words are less often repeated
_SHORT_CONTEXT = 4096
_LETTERS = 6


@dataclass(frozen=True)
class CommonWords:
    """Ten common words among rarer ones of ``vocabulary``, after a worked example; ``short`` contexts repeat less."""

    vocabulary: tuple[str, ...]
    short: bool

    @classmethod
    def at(cls, vocabulary: list[str], context: int) -> CommonWords:
        """The task as RULER sets it at this context."""
        return cls(tuple(vocabulary), context < _SHORT_CONTEXT)

    def build(self, random: Random, index: int, size: int) -> Prompt:
        """The prompt of one sample with ``size`` different words in its list, ten of them common."""
        shown = self._list(random, *((20, 3, 1) if self.short else (40, 10, 3)))
        asked = self._list(random, size, *((6, 1) if self.short else (30, 3)))
        worked = f"{shown.text}{shown.prefix}{numbered(list(shown.answers))}\n"
        return Prompt(worked + asked.text, asked.prefix, asked.answers)

    def _list(self, random: Random, size: int, common: int, rare: int) -> Prompt:
        words = random.sample(self.vocabulary, size)
        answers = words[:_ANSWERS]
        entries = answers * common + words[_ANSWERS:] * rare
        random.shuffle(entries)
        return Prompt(COMMON.format(context=numbered(entries)), COMMON_PREFIX, tuple(answers))


def numbered(words: list[str]) -> str:
    """The words as ``1. acorn 2. actor``."""
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


@dataclass(frozen=True)
class CodedWords:
    """Coded words whose counts fall with the square of their rank; the first rank is dots, the next three are asked."""

    different: int

    @classmethod
    def at(cls, context: int) -> CodedWords:
        """The task as RULER sets it at this context: one word in fifty tokens is new."""
        return cls(context // 50)

    def build(self, random: Random, index: int, size: int) -> Prompt:
        """The prompt of one sample with about ``size`` coded words."""
        words: list[str] = ["..."]
        while len(words) < self.different:
            word = "".join(random.choices(string.ascii_lowercase, k=_LETTERS))
            if word not in words:
                words.append(word)
        # the sum of 1 / k^2 over all k
        zeta = math.pi**2 / 6
        text = [word for rank, word in enumerate(words, start=1) for _ in range(int(size / zeta / rank**2))]
        random.shuffle(text)
        return Prompt(CODED.format(context=" ".join(text)), CODED_PREFIX, tuple(words[1:4]))
