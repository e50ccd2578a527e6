"""Prompts of one length, and the answers that are written behind them, of records that people answered.

GSM8K and MATH-500 are asked behind as many worked examples as fill the prompt, the first of which is cut; documents of
LongBench lose their middle, as in that benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.errors import AatcError, UsageError
from aatc_cli.evals.lm_eval.longbench import TEMPLATES
from aatc_cli.evals.lm_eval.records import LONGBENCH, Source, json_lines
from aatc_cli.models.tokenizer import Tokenizer
from aatc_cli.text.ruler.prompt import Prompt, Reference, Sample

SUBTASKS = ("gsm8k", "math-500", *LONGBENCH)
# a question, its answer
Pair = tuple[str, str]
_HINT = "give the folder of benchmark folders by --data"
_FOLDERS = {"gsm8k": ("gsm8k",), "math-500": ("math-500", "math500")}


@dataclass(frozen=True)
class Job:
    """Records of one subtask, ready to be asked."""

    subtask: str
    samples: list[Sample]
    references: list[Reference]
    prompts: str

    @property
    def place(self) -> tuple[str, None]:
        """The subtask; its prompts have the length asked for."""
        return self.subtask, None

    def part(self, begin: int, end: int) -> Job:
        """The records from ``begin`` on and before ``end``."""
        return replace(self, samples=self.samples[begin:end], references=self.references[begin:end])

    @property
    def what(self) -> str:
        """Its name in progress."""
        return f"references of {self.subtask}"


def chosen_subtasks(wanted: Sequence[str]) -> list[str]:
    """Subtasks that match any of the globs, all without any; raises `UsageError` for one that matches none."""
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in SUBTASKS):
            raise UsageError(f"there are no references of {pattern!r}", f"its subtasks are {', '.join(SUBTASKS)}")
    return [name for name in SUBTASKS if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)]


def make_job(subtask: str, data: Path, tokenizer: Tokenizer, length: int, answer: int, limit: int) -> Job:
    """The first ``limit`` records of a subtask that fill a prompt of ``length`` tokens.

    Raises `AatcError` where the files are not there, or no record is long enough.
    """
    made = _examples(subtask, data, tokenizer, length) if subtask in _FOLDERS else _long(subtask, data, tokenizer)
    start = [] if tokenizer.bos is None else [tokenizer.bos]
    room = length - len(start)
    samples: list[Sample] = []
    references: list[Reference] = []
    for prompt, keep_front in made:
        tokens, behind = _tokens(prompt, tokenizer)
        if len(tokens) < room:
            continue
        front = room // 2 if keep_front else 0
        kept = start + tokens[:front] + tokens[len(tokens) - (room - front) :]
        written = behind[:answer]
        samples.append(Sample(prompt, kept))
        references.append(Reference(written, ((0, len(written)),)))
        if len(samples) == limit:
            break
    if not samples:
        raise AatcError(f"no record of {subtask} fills a prompt of {length} tokens", "use a shorter --length")
    asked = digest_of([[s.tokens, r.tokens] for s, r in zip(samples, references, strict=True)])
    return Job(subtask, samples, references, asked)


def _tokens(prompt: Prompt, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens of a prompt, and those of its answer behind it."""
    known = tokenizer.encode(prompt.text)
    longer = tokenizer.encode(f"{prompt.text} {prompt.answers[0]}")
    if longer[: len(known)] != known or len(longer) == len(known):
        # a tokenizer that joins both writes the answer by itself
        return known, tokenizer.encode(f" {prompt.answers[0]}")
    return known, longer[len(known) :]


def _examples(subtask: str, data: Path, tokenizer: Tokenizer, length: int) -> Iterator[tuple[Prompt, bool]]:
    """Questions behind worked examples that are none of them."""
    asked, examples = _pairs(subtask, data)
    shown: list[str] = []
    tokens = 0
    for question, answer in examples:
        if tokens > length:
            break
        shown.append(f"Question: {question}\nAnswer: {answer}\n\n")
        tokens += len(tokenizer.encode(shown[-1]))
    worked = "".join(shown)
    for question, answer in asked:
        yield Prompt(f"{worked}Question: {question}\nAnswer:", "", (answer,)), False


def _pairs(subtask: str, data: Path) -> tuple[list[Pair], list[Pair]]:
    """Questions with their answers: those that are asked, and the examples before them."""
    folder = next((data / name for name in _FOLDERS[subtask] if (data / name).is_dir()), None)
    if folder is None:
        raise AatcError(f"{data} has no folder {_FOLDERS[subtask][0]}", _HINT)
    if subtask == "gsm8k":
        asked, examples = (_fields(folder / name, "question", "answer") for name in ("test.jsonl", "train.jsonl"))
        return asked, examples
    every = _fields(folder / "test.jsonl", "problem", "solution")
    # there is no training part beside it: the last quarter is never asked
    edge = len(every) * 3 // 4
    return every[:edge], every[edge:]


def _fields(path: Path, question: str, answer: str) -> list[Pair]:
    rows = json_lines(path)
    if not all(isinstance(row.get(name), str) for row in rows for name in (question, answer)):
        raise AatcError(f"{path} has records without {question} and {answer}", "give the benchmark's own files")
    return [(row[question], row[answer]) for row in rows]


def _long(subtask: str, data: Path, tokenizer: Tokenizer) -> Iterator[tuple[Prompt, bool]]:
    """Documents of LongBench with their question, and the first of the answers."""
    folder = data / "longbench"
    if not folder.is_dir():
        raise AatcError(f"{data} has no folder longbench", _HINT)
    records: Sequence[dict[str, Any]] = Source("longbench", folder).read(subtask)["test"]
    fill: Callable[..., str] = TEMPLATES[subtask].format
    for record in records:
        yield Prompt(fill(context=record["context"], input=record["input"]), "", (str(record["answers"][0]),)), True
