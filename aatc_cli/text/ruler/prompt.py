"""What every RULER task makes, and the longest haystack that a context has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from aatc_cli.errors import AatcError

# draws of one sample in search of the usual length
_ATTEMPTS = 16

Metric = Literal["string_match_all", "string_match_part"]


@dataclass(frozen=True)
class Prompt:
    """One question: the ``text`` of the user, the ``prefix`` of the answer, and the strings its rest must contain."""

    text: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """One RULER task at one context length.

    build(random, index, size) makes the prompt of sample ``index`` with ``size`` units of haystack (lines, words,
    documents); all that does not belong to the haystack is drawn first, so it is the same at every size. ``least`` and
    ``most`` bound the size; ``room`` is the tokens the answer may take; ``questions`` bounds the samples. ``scarce``
    says what has run out when the haystack cannot grow to the context, or is None where a shorter one is in order.
    ``joiner`` stands between the strings of an answer that has them in the order asked; None where any order is right.
    """

    name: str
    metric: Metric
    room: int
    least: int
    build: Callable[[Random, int, int], Prompt]
    most: int | None = None
    questions: int | None = None
    scarce: str | None = None
    joiner: str | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt and the tokens the model is given for it."""

    prompt: Prompt
    tokens: list[int]


def make_samples(
    task: Task, context: int, count: int, seed: int, encode: Callable[[Prompt], list[int]]
) -> list[Sample]:
    """At most ``count`` prompts that leave ``task.room`` tokens of ``context`` free; ``encode`` gives their tokens.

    The haystack is as long as the first sample's can be. Samples are drawn until they have the most common length in
    tokens, or come near it, so that few lengths are left: sequences of equal length are generated together. Raises
    `AatcError` when not even the smallest haystack fits, or there is not enough to make a larger one of.
    """
    budget = context - task.room

    def draw(index: int, attempt: int, size: int) -> Sample:
        # a string seeds through a hash that is the same on every machine and version
        prompt = task.build(Random(f"{seed} {task.name} {context} {index} {attempt}"), index, size)
        return Sample(prompt, encode(prompt))

    size = largest_size(task, lambda size: len(draw(0, 0, size).tokens) <= budget)
    if size == 0:
        raise too_small(task, context)
    if size == task.most and task.scarce:
        raise AatcError(f"{task.name} cannot fill a context of {context} tokens: {task.scarce}", "give a longer --text")
    count = min(count, task.questions or count)
    lengths = [len(draw(index, 0, size).tokens) for index in range(min(count, _ATTEMPTS))]
    usual = Counter(length for length in lengths if length <= budget).most_common(1)[0][0]
    samples = []
    for index in range(count):
        used, nearest = size, None
        while nearest is None:
            if used < task.least:
                raise too_small(task, context)
            drawn = (draw(index, attempt, used) for attempt in range(_ATTEMPTS))
            nearest = _nearest(drawn, usual, budget)
            used -= max(used // 50, 1)
        samples.append(nearest)
    return samples


def _nearest(drawn: Iterable[Sample], usual: int, budget: int) -> Sample | None:
    """The first sample of the usual length, or else the one nearest to it within the budget, if there is one."""
    best: Sample | None = None
    for sample in drawn:
        length = len(sample.tokens)
        if length == usual:
            return sample
        if length <= budget and (best is None or abs(length - usual) < abs(len(best.tokens) - usual)):
            best = sample
    return best


def largest_size(task: Task, fits: Callable[[int], bool]) -> int:
    """The largest size for which ``fits`` holds, which is true up to some size; 0 when it is true for none."""
    low, high = task.least, task.least
    if not fits(low):
        return 0
    while task.most is None or high < task.most:
        high = min(high * 2, task.most) if task.most is not None else high * 2
        if not fits(high):
            break
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def too_small(task: Task, context: int) -> AatcError:
    """The error for a context that has no room for the task."""
    return AatcError(
        f"{task.name} with {task.room} new tokens does not fit into a context of {context} tokens",
        "give a larger --context",
    )


@dataclass(frozen=True)
class Reference:
    """The tokens behind a prompt that write its answer down, and which of them each string of the answer has.

    spans: [begin, end) of every string among ``tokens``, without the blank or comma before it.
    """

    tokens: list[int]
    spans: tuple[tuple[int, int], ...]


def reference_of(
    sample: Sample, joiner: str, encode: Callable[[Prompt], list[int]], decode: Callable[[list[int]], str]
) -> Reference:
    """How the answer of a sample is written: a blank and its strings, ``joiner`` between them.

    Raises `AatcError` for a tokenizer that writes the prompt in other tokens when the answer stands behind it.
    """
    prompt, known = sample.prompt, sample.tokens
    tokens, spans = list(known), []
    for count in range(1, len(prompt.answers) + 1):
        written = " " + joiner.join(prompt.answers[:count])
        longer = encode(replace(prompt, prefix=prompt.prefix + written))
        if longer[: len(tokens)] != tokens:
            raise AatcError(
                f"the tokenizer writes a prompt in other tokens when the answer {prompt.answers[0]!r} stands behind it",
                "use generation: --mode generate",
            )
        begin = len(tokens)
        # a token of white space or a comma alone is no part of the answer
        while begin < len(longer) - 1 and not decode([longer[begin]]).strip(" ,"):
            begin += 1
        spans.append((begin - len(known), len(longer) - len(known)))
        tokens = longer
    return Reference(tokens[len(known) :], tuple(spans))
