"""Questions on documents: SQuAD and HotpotQA paragraphs, the right ones among others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from aatc_cli.errors import AatcError
from aatc_cli.text.ruler.prompt import Prompt

_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
QUESTION = f"{_INSTRUCTION}The following are given documents.\n\n{{context}}\n\n{_INSTRUCTION}Question: {{query}}"
PREFIX = " Answer:"
SQUAD_FILE, HOTPOT_FILE = "dev-v2.0.json", "hotpot_dev_distractor_v1.json"


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, the documents that answer it, and others of the same article."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """A collection: its documents, and questions on them in the order of the file."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def least(self) -> int:
        """Documents that every prompt needs."""
        return max(len(question.gold) for question in self.questions)

    def build(self, random: Random, index: int, size: int) -> Prompt:
        """The prompt of question ``index`` among ``size`` documents: its own, then of its article, then any."""
        question = self.questions[index]
        missing = max(size - len(question.gold), 0)
        chosen = [*question.gold, *random.sample(question.near, min(missing, len(question.near)))]
        if len(chosen) < size:
            known = {*question.gold, *question.near}
            others = [place for place in range(len(self.documents)) if place not in known]
            chosen += random.sample(others, min(size - len(chosen), len(others)))
        random.shuffle(chosen)
        context = "\n\n".join(f"Document {n}:\n{self.documents[place]}" for n, place in enumerate(chosen, start=1))
        return Prompt(QUESTION.format(context=context, query=question.text), PREFIX, question.answers)


def read_squad(path: Path) -> Questions:
    """The answerable questions of a SQuAD v2 file; raises `AatcError` when it is not one."""

    def collect(data: Any) -> Iterable[tuple[str, list[str], list[str], list[str]]]:
        for article in data["data"]:
            paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    if not asked.get("is_impossible", False):
                        answers = [answer["text"] for answer in asked["answers"]]
                        yield asked["question"], answers, [paragraph["context"]], paragraphs

    return _read(path, "SQuAD", collect)


def read_hotpot(path: Path) -> Questions:
    """The questions of a HotpotQA file with its distractor paragraphs; raises `AatcError` when it is not one."""

    def collect(data: Any) -> Iterable[tuple[str, list[str], list[str], list[str]]]:
        for record in data:
            paragraphs = [f"{title}\n{''.join(sentences)}" for title, sentences in record["context"]]
            yield record["question"], [record["answer"]], paragraphs, []

    return _read(path, "HotpotQA", collect)


def hub_squad(records: Iterable[Mapping[str, Any]]) -> Questions:
    """The same from the records of the hub's SQuAD v2, one question each."""
    rows = list(records)
    articles: dict[str, list[str]] = {}
    for row in rows:
        articles.setdefault(row["title"], []).append(row["context"])
    return _indexed(
        (row["question"], list(row["answers"]["text"]), [row["context"]], articles[row["title"]])
        for row in rows
        if row["answers"]["text"]
    )


def hub_hotpot(records: Iterable[Mapping[str, Any]]) -> Questions:
    """The same from the records of the hub's HotpotQA (distractor), one question each."""
    return _indexed(
        (
            row["question"],
            [row["answer"]],
            [f"{t}\n{''.join(s)}" for t, s in zip(row["context"]["title"], row["context"]["sentences"], strict=True)],
            [],
        )
        for row in records
    )


def _read(
    path: Path, what: str, collect: Callable[[Any], Iterable[tuple[str, list[str], list[str], list[str]]]]
) -> Questions:
    try:
        return _indexed(collect(json.loads(path.read_text(encoding="utf-8"))))
    except OSError as error:
        raise AatcError(f"{path} cannot be read: {error.strerror}", f"give the folder of the {what} file") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AatcError(f"{path} is not a {what} file", f"fetch the original {path.name} again") from error


def _indexed(rows: Iterable[tuple[str, list[str], list[str], list[str]]]) -> Questions:
    """Questions with their documents by index; raises `ValueError` when there are none."""
    found = list(rows)
    if not found:
        raise ValueError("no questions")
    documents = sorted({text for _, _, gold, near in found for text in (*gold, *near)})
    place = {text: index for index, text in enumerate(documents)}
    questions = []
    for text, answers, gold, near in found:
        own = tuple(dict.fromkeys(place[document] for document in gold))
        others = tuple(sorted({place[document] for document in near} - set(own)))
        questions.append(Question(text, tuple(answers), own, others))
    return Questions(tuple(documents), tuple(questions))
