"""Needles in a haystack: the eight tasks of RULER that hide key-value sentences in noise, essays or other needles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Literal

from aatc_cli.text.ruler.prompt import Prompt
from aatc_cli.text.ruler.words import Kind, draw_distinct

Haystack = Literal["noise", "essay", "needles"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What is the special magic {kind} for {query} mentioned in the provided text?"
)
ONE_PREFIX = " The special magic {kind} for {query} mentioned in the provided text is"
SEVERAL = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}\n"
    "What are all the special magic {kind} for {query} mentioned in the provided text?"
)
SEVERAL_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"

# an essay takes its needles at some of this many evenly spaced depths
_DEPTHS = 40
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Needles:
    """What is hidden and what is asked: ``values`` per key, of which ``queries`` keys are asked for.

    ``words`` are those of the essays, in order; they are repeated when a context is longer than all of them.
    """

    haystack: Haystack
    keys: int = 1
    values: int = 1
    queries: int = 1
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    words: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """Smallest haystack: a line, or some words, for every needle."""
        return self.keys * self.values * (1 if self.haystack != "essay" else 8)

    def build(self, random: Random, index: int, size: int) -> Prompt:
        """The prompt of one sample with ``size`` lines, or words of essay, around the needles."""
        keys = draw_distinct(self.key_kind, self.keys, random)
        drawn = draw_distinct(self.value_kind, self.keys * self.values, random, keys)
        values = {key: drawn[place * self.values : (place + 1) * self.values] for place, key in enumerate(keys)}
        asked = random.sample(keys, self.queries)
        needles = [self._needle(key, value) for key in keys for value in values[key]]
        random.shuffle(needles)
        hide = self.in_essay if self.haystack == "essay" else self._in_lines
        context = hide(needles, random, size, {*keys, *drawn})
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        answers = tuple(value for key in asked for value in values[key])
        one = len(answers) == 1
        text, prefix = (ONE, ONE_PREFIX) if one else (SEVERAL, SEVERAL_PREFIX)
        kind = self.value_kind.removesuffix("s") if one else self.value_kind
        return Prompt(
            text.format(kind=kind, context=context, query=query), prefix.format(kind=kind, query=query), answers
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _in_lines(self, needles: list[str], random: Random, size: int, taken: set[str]) -> str:
        lines = [NOISE] * size
        if self.haystack == "needles":
            keys = draw_distinct(self.key_kind, size, random, taken)
            values = draw_distinct(self.value_kind, size, random, taken)
            lines = [self._needle(key, value) for key, value in zip(keys, values, strict=True)]
        # from the back, so that a line put in moves none of the places still to be used
        for place, needle in zip(sorted(random.sample(range(size), len(needles)), reverse=True), needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def in_essay(self, needles: list[str], random: Random, size: int, taken: set[str]) -> str:
        """``size`` words of the essay with the needles between its sentences, at depths that are drawn."""
        repeats = -(-size // len(self.words))
        sentences = _SENTENCE_END.split(" ".join((self.words * repeats)[:size]))
        depths = sorted(random.sample(range(_DEPTHS), len(needles)))
        places = [len(sentences) * depth // (_DEPTHS - 1) for depth in depths]
        parts: list[str] = []
        for begin, end, needle in zip([0, *places], places, needles, strict=False):
            parts += [*sentences[begin:end], needle]
        return " ".join([*parts, *sentences[places[-1] :]])


def essay_words(text: str) -> tuple[str, ...]:
    """The words of a text for an essay haystack, white space of any length between them."""
    return tuple(text.split())
