"""A text with several numbers in it, and turns that ask for one after the other, with the right answers between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.evals.turns.settings import Settings
from aatc_cli.models.generation import plain_tokens
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.text.ruler.needles import NEEDLE, ONE, ONE_PREFIX, Needles, essay_words
from aatc_cli.text.ruler.prompt import Prompt, Reference, Sample, Task, make_samples, reference_of
from aatc_cli.text.ruler.words import draw_distinct
from aatc_cli.text.sources import documents, parse_source

# tokens of an answer: a number of seven digits and a blank
_ROOM = 12
_LATER = "\n\n{other}\nWhat is the special magic number for {query} mentioned in the first text?"
_NEXT = "\n\nWhat is the special magic number for {query} mentioned in the first text?"
_LATER_PREFIX = " The special magic number for {query} mentioned in the first text is"


@dataclass(frozen=True)
class Conversations:
    """Conversations over texts of one length. samples: the first turn up to its answer; references: all behind it.

    A reference has a span for the answer of every turn.
    """

    context: int
    samples: list[Sample]
    references: list[Reference]

    @property
    def what(self) -> str:
        """Its name in progress."""
        return f"turns at {self.context}"

    @property
    def digest(self) -> str:
        """Of all that the model is given."""
        return digest_of([[s.tokens, r.tokens, r.spans] for s, r in zip(self.samples, self.references, strict=True)])


def words_around(settings: Settings) -> tuple[str, ...]:
    """The words of the text around the numbers; raises `AatcError` where it cannot be read."""
    return essay_words("\n\n".join(document for spec in settings.text for document in documents(parse_source(spec))))


def conversations(words: tuple[str, ...], context: int, settings: Settings, tokenizer: Tokenizer) -> Conversations:
    """``settings.limit`` conversations; raises `AatcError` for a context without room.

    The first turn is a prompt; later ones are text of their own, whose tokens stand behind those before.
    """
    asked: dict[str, list[Prompt]] = {}

    def build(random: Random, index: int, size: int) -> Prompt:
        keys = draw_distinct("words", settings.turns, random)
        values = draw_distinct("numbers", settings.turns, random, keys)
        needles = [NEEDLE.format(kind="numbers", key=key, value=value) for key, value in zip(keys, values, strict=True)]
        shuffled = random.sample(needles, len(needles))
        place = random.randrange(len(words))
        haystack = Needles("essay", words=words).in_essay(shuffled, random, size, set())
        first = Prompt(
            ONE.format(kind="number", context=haystack, query=keys[0]),
            ONE_PREFIX.format(kind="number", query=keys[0]),
            (values[0],),
        )
        asked[first.text] = [
            _later(key, value, _some(words, place + turn * settings.between, settings.between))
            for turn, (key, value) in enumerate(zip(keys[1:], values[1:], strict=True))
        ]
        return first

    def first_tokens(prompt: Prompt) -> list[int]:
        return plain_tokens(tokenizer, prompt.text + prompt.prefix)

    task = Task("turns", "string_match_all", _ROOM, 8 * settings.turns, build)
    samples = make_samples(task, context, settings.limit, settings.seed, first_tokens)
    decode = tokenizer.raw.decode
    references = []
    for sample in samples:
        found = reference_of(sample, ", ", first_tokens, decode)
        for prompt in asked[sample.prompt.text]:
            found = _followed(found, prompt, tokenizer.encode, decode)
        references.append(found)
    return Conversations(context, samples, references)


def _later(key: str, value: str, other: str) -> Prompt:
    text = _LATER.format(other=other, query=key) if other else _NEXT.format(query=key)
    return Prompt(text, _LATER_PREFIX.format(query=key), (value,))


def _some(words: tuple[str, ...], place: int, count: int) -> str:
    """``count`` words from a place on, from the beginning again behind the last."""
    return " ".join(words[(place + step) % len(words)] for step in range(count))


def _followed(
    before: Reference, prompt: Prompt, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> Reference:
    """A reference with a further turn behind it, and the span of that turn's answer."""

    def tokens_of(one: Prompt) -> list[int]:
        return encode(one.text + one.prefix)

    sample = Sample(prompt, tokens_of(prompt))
    answer = reference_of(sample, ", ", tokens_of, decode)
    shift = len(before.tokens) + len(sample.tokens)
    spans = tuple((begin + shift, end + shift) for begin, end in answer.spans)
    return Reference([*before.tokens, *sample.tokens, *answer.tokens], before.spans + spans)
