"""Variable tracking: a chain of assignments is scattered over noise, and all its variables are asked for."""

from __future__ import annotations

import string
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from aatc_cli.text.ruler.needles import NOISE
from aatc_cli.text.ruler.prompt import Prompt

# the spelling of "assgined" and the blank at the end are RULER's own; the blank is left out where the model goes on
# writing, because tokenizers join it to the word behind it
QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assgined "
    "the value {value}, they are: "
)
HOPS = 4
LEAST = HOPS + 2


@dataclass(frozen=True)
class Chains:
    """One chain of four hops, after a worked example with ``example`` lines of noise and shorter names."""

    example: int

    def build(self, random: Random, index: int, size: int) -> Prompt:
        """The prompt of one sample with ``size`` lines of noise around its chain."""
        shown = chain_prompt(random, self.example, letters=3)
        asked = chain_prompt(random, size, letters=5)
        worked = f"{shown.text}{shown.prefix} {' '.join(shown.answers)}\n\n\n\n"
        return Prompt(worked + asked.text, asked.prefix.rstrip(), asked.answers)


def chain_prompt(random: Random, size: int, letters: int) -> Prompt:
    """One chain in ``size`` lines of noise, without a worked example; names have ``letters`` capitals."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(random.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = str(random.randint(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    lines = [NOISE + "\n"] * size
    places = sorted(random.sample(range(size), len(chain)))
    for shift, (place, link) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + shift, link)
    context = " ".join(lines).replace(". \n", ".\n")
    return Prompt(
        QUESTION.format(context=context, value=value), PREFIX.format(count=len(names), value=value), tuple(names)
    )
