"""The records of the benchmarks that lm-eval asks: from the hub, or from JSON lines in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aatc_cli.errors import AatcError, UsageError

Record = dict[str, Any]
Splits = dict[str, list[Record]]

# the paper's seven subsets of LongBench, and one more that is small enough to come as one file
LONGBENCH = ("triviaqa", "qasper", "trec", "samsum", "lcc", "repobench-p", "qmsum", "multi_news")
SUBTASKS = {
    "gsm8k": ("gsm8k",),
    "mmlu-pro": ("math", "computer_science"),
    "math-500": ("math-500",),
    "longbench": LONGBENCH,
}
HUB = "hub"


@dataclass(frozen=True)
class Source:
    """Where a benchmark's records are: the hub, or a ``folder``."""

    benchmark: str
    folder: Path | None

    @classmethod
    def of(cls, benchmark: str, data: str | None) -> Source:
        """The source of ``--data``: a folder, or the hub without one; raises `AatcError` when it is not there."""
        if data in (None, HUB):
            return cls(benchmark, None)
        folder = Path(str(data))
        if not folder.is_dir():
            raise AatcError(f"there is no folder {data}", "give the folder with the benchmark's JSON lines, or hub")
        return cls(benchmark, folder)

    def read(self, subtask: str) -> Splits:
        """The records of one subtask by split ("test", "validation"); raises `AatcError` when they cannot be read."""
        reader = _READERS[self.benchmark]
        found = reader(self, subtask)
        if not all(found.values()):
            empty = next(split for split, rows in found.items() if not rows)
            raise AatcError(f"{self.benchmark} has no {empty} records of {subtask} here", "check the folder of --data")
        return found

    def _rows(self, pattern: str, hub: tuple[str, str | None], split: str) -> list[Record]:
        if self.folder is None:
            return _hub_rows(*hub, split)
        paths = sorted(self.folder.glob(pattern))
        if not paths:
            raise AatcError(f"{self.folder} has no file {pattern}", f"put the JSON lines of {self.benchmark} there")
        return [row for path in paths for row in json_lines(path)]


def _gsm8k(source: Source, subtask: str) -> Splits:
    return {"test": source._rows("test.jsonl", ("openai/gsm8k", "main"), "test")}


def _math(source: Source, subtask: str) -> Splits:
    return {"test": source._rows("test.jsonl", ("HuggingFaceH4/MATH-500", None), "test")}


def _mmlu(source: Source, subtask: str) -> Splits:
    hub, subject = ("TIGER-Lab/MMLU-Pro", None), subtask.replace("_", " ")
    return {
        split: [row for row in source._rows(f"{split}*.jsonl", hub, split) if row.get("category") == subject]
        for split in ("test", "validation")
    }


def _longbench(source: Source, subtask: str) -> Splits:
    original = None if source.folder is None else source.folder / "qmsum_test.jsonl"
    if subtask == "qmsum" and original is not None and original.is_file():
        return {"test": [row for meeting in json_lines(original) for row in qmsum_rows(meeting)]}
    rows = source._rows(f"{subtask}.jsonl", ("Xnhyacinth/LongBench", subtask), "test")
    # the copy on the hub that has no loading script calls the field "input" by another name
    return {"test": [row if "input" in row else row | {"input": row.get("question", "")} for row in rows]}


_READERS: dict[str, Callable[[Source, str], Splits]] = {
    "gsm8k": _gsm8k,
    "mmlu-pro": _mmlu,
    "math-500": _math,
    "longbench": _longbench,
}


def qmsum_rows(meeting: Record) -> Iterable[Record]:
    """The queries of one meeting of the original QMSum as records of LongBench: a transcript, a query, its answer."""
    lines = (f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"])
    context = "\n".join(lines)
    for query in (*meeting["general_query_list"], *meeting["specific_query_list"]):
        yield {"context": context, "input": query["query"], "answers": [query["answer"]]}


def chosen_subtasks(benchmark: str, wanted: list[str]) -> list[str]:
    """Subtasks named exactly or by a glob, in order, all without names; raises `UsageError` for an unknown one."""
    names = SUBTASKS[benchmark]
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"{benchmark} has no subtask {pattern!r}", f"its subtasks are {', '.join(names)}")
    return [name for name in names if not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)]


def json_lines(path: Path) -> list[Record]:
    """The objects of a file of JSON lines; raises `AatcError` when it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise AatcError(f"{path} cannot be read: {error}", "it must hold one JSON object per line") from error
    if not all(isinstance(row, dict) for row in rows):
        raise AatcError(f"{path} holds lines that are no JSON objects", "it must hold one JSON object per line")
    return rows


def _hub_rows(name: str, config: str | None, split: str) -> list[Record]:
    try:
        # imported here: it takes seconds, and only the hub needs it
        from datasets import load_dataset

        return [dict(row) for row in load_dataset(name, config, split=split)]
    except Exception as error:
        # the hub client fails with errors of many libraries; the user needs one sentence and the first line of theirs
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise AatcError(
            f"the dataset {name} cannot be read from the hub ({reason})", "give a folder with its JSON lines by --data"
        ) from error
