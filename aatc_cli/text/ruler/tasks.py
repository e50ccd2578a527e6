"""The table of the thirteen tasks, and what each of them is made from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from random import Random

from aatc_cli.errors import AatcError, UsageError
from aatc_cli.text.ruler.chains import LEAST as CHAIN_LEAST
from aatc_cli.text.ruler.chains import Chains, chain_prompt
from aatc_cli.text.ruler.counting import LEAST_CODED, LEAST_COMMON, CodedWords, CommonWords
from aatc_cli.text.ruler.needles import Needles, essay_words
from aatc_cli.text.ruler.prompt import Prompt, Task, largest_size
from aatc_cli.text.ruler.questions import HOTPOT_FILE, SQUAD_FILE, Questions
from aatc_cli.text.ruler.words import vocabulary

_NEEDLES: dict[str, Needles] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value_kind="uuids"),
    "niah_multikey_1": Needles("essay", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles("essay", values=4),
    "niah_multiquery": Needles("essay", keys=4, queries=4),
}
TASKS = (*_NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
SAMPLES = 500
# of the worked example of variable tracking, its answer included
_EXAMPLE_TOKENS = 500
_FILES = {"qa_1": SQUAD_FILE, "qa_2": HOTPOT_FILE}


@dataclass(frozen=True)
class Material:
    """What prompts are made from: a text for essays and vocabulary, and the collections of qa_1 and qa_2 if given."""

    text: str
    squad: Questions | None = None
    hotpot: Questions | None = None


def chosen_tasks(patterns: Sequence[str]) -> list[str]:
    """Tasks that match any of the shell patterns, in the table's order; all without patterns. Raises `UsageError`."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in TASKS):
            raise UsageError(f"RULER has no task {pattern!r}", f"its tasks are {', '.join(TASKS)}")
    return [name for name in TASKS if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def make_task(name: str, context: int, material: Material, encode: Callable[[Prompt], list[int]]) -> Task:
    """The task ``name`` of `TASKS` at one context; raises `AatcError` when what it is made from is not there."""
    if name in _NEEDLES:
        needles = replace(_NEEDLES[name], words=essay_words(material.text))
        joiner = ", " if needles.values == 1 else None
        return Task(name, "string_match_all", 128, needles.least, needles.build, joiner=joiner)
    if name == "vt":
        return Task(name, "string_match_all", 30, CHAIN_LEAST, Chains(_example_size(encode)).build, joiner=" ")
    if name == "cwe":
        words = vocabulary(material.text)
        return Task(
            name,
            "string_match_all",
            120,
            LEAST_COMMON,
            CommonWords.at(words, context).build,
            most=len(words),
            scarce=f"there are only {len(words)} different words",
        )
    if name == "fwe":
        return Task(name, "string_match_all", 50, LEAST_CODED, CodedWords.at(context).build)
    collection = material.squad if name == "qa_1" else material.hotpot
    if collection is None:
        raise AatcError(f"{name} needs the file {_FILES[name]}", "give its folder with --data, or --data hub")
    return Task(
        name,
        "string_match_part",
        32,
        collection.least,
        collection.build,
        most=len(collection.documents),
        questions=len(collection.questions),
    )


def _example_size(encode: Callable[[Prompt], list[int]]) -> int:
    """Lines of noise in the worked example of variable tracking, the same for all samples."""

    def fits(size: int) -> bool:
        return len(encode(chain_prompt(Random("vt example"), size, letters=3))) + 30 <= _EXAMPLE_TOKENS

    probe = Task("vt", "string_match_all", 30, CHAIN_LEAST, Chains(0).build)
    return max(largest_size(probe, fits), CHAIN_LEAST)
