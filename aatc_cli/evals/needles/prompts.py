"""One number hidden in an essay at a chosen depth, and the question for it, in the words of RULER's needles."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from aatc_cli.evals.answers.asking import prompt_tokens
from aatc_cli.evals.needles.settings import Settings
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.text.ruler.needles import NEEDLE, ONE, ONE_PREFIX, essay_words
from aatc_cli.text.ruler.prompt import Prompt, Sample, Task, make_samples
from aatc_cli.text.ruler.words import draw_distinct
from aatc_cli.text.sources import documents, parse_source

# samples by (context, depth)
Grid = dict[tuple[int, int], list[Sample]]

# tokens of an answer: a number of seven digits and some words around it
ROOM = 32
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def needle_samples(
    text: str, context: int, depth: int, count: int, seed: int, encode: Callable[[Prompt], list[int]]
) -> list[Sample]:
    """``count`` prompts that fill ``context`` tokens with words of ``text`` around a needle ``depth`` percent deep.

    Keys and numbers are the same at every depth. Raises `AatcError` for a context without room.
    """
    words = essay_words(text)

    def build(random: Random, index: int, size: int) -> Prompt:
        # not the generator given: that differs from attempt to attempt, and the needle must not
        own = Random(f"{seed} needle {context} {index}")
        [key] = draw_distinct("words", 1, own)
        [value] = draw_distinct("numbers", 1, own, [key])
        repeats = -(-size // len(words))
        sentences = _SENTENCE_END.split(" ".join((words * repeats)[:size]))
        place = round(len(sentences) * depth / 100)
        needle = NEEDLE.format(kind="numbers", key=key, value=value)
        haystack = " ".join([*sentences[:place], needle, *sentences[place:]])
        prefix = ONE_PREFIX.format(kind="number", query=key)
        return Prompt(ONE.format(kind="number", context=haystack, query=key), prefix, (value,))

    task = Task(f"needle at {depth} %", "string_match_all", ROOM, 8, build)
    return make_samples(task, context, count, seed, encode)


def needle_grid(tokenizer: Tokenizer, settings: Settings) -> Grid:
    """The prompts of every context and depth; raises `AatcError` for a context without room."""

    def encode(prompt: Prompt) -> list[int]:
        return prompt_tokens(tokenizer, prompt, chat=settings.chat)

    text = "\n\n".join(document for spec in settings.text for document in documents(parse_source(spec)))
    return {
        (context, depth): needle_samples(text, context, depth, settings.limit, settings.seed, encode)
        for context in dict.fromkeys(settings.context)
        for depth in dict.fromkeys(settings.depth)
    }
