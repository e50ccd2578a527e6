"""The tasks of eval, one folder each: settings, measure, result, table; imported when a task is asked for.

A new task is a folder and a line in `TASKS`. In its folder

- ``settings.py`` has ``Settings``: what is asked, which the options of the sub-command are made from; imports no torch;
- ``result.py`` has ``Result``: what a file of the task holds; imports no model code;
- ``measure.py`` has ``measure(opened, settings)``, and ``measure_profile`` where a profile alone can be measured;
- ``table.py`` has ``tables(results)``: the same for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

# groups of options that tasks share (`cli/options.py`)
_TEXT = ("model", "plans", "device", "device-map", "batch", "dry-run")
_RECALL = ("model", "plans", "device", "device-map")
_CACHE = ("model", "plans", "device", "cache")
_ANSWERS = (*_CACHE, "batch")
_FORCED = ("model", "plans", "device", "batch")


@dataclass(frozen=True)
class Task:
    """One task: its name on the command line, the folder it stands in, and the groups of options it reads.

    kind: what its files call it, where several tasks share one form of file. runner: what measures it, where that runs
    other stages and stands above the evaluations.
    """

    name: str
    folder: str
    summary: str
    reads: tuple[str, ...]
    kind: str = ""
    runner: str = "aatc_cli.stages.eval:evaluate"

    @property
    def file_kind(self) -> str:
        """What the files of the task say they are of."""
        return self.kind or self.name

    def part(self, module: str, name: str) -> Any:
        """What the task's folder calls ``name`` in its ``module``."""
        return getattr(import_module(f"aatc_cli.evals.{self.folder}.{module}"), name)

    def call(self) -> Any:
        """The function that measures the task."""
        module, _, name = self.runner.partition(":")
        return getattr(import_module(module), name)


TASKS: tuple[Task, ...] = (
    Task("kl", "kl", "Divergence of the next token from the uncompressed model's, on held-out text.", _TEXT),
    Task("perplexity", "perplexity", "Perplexity with the compressed cache, on held-out text.", _TEXT),
    Task("recall", "recall", "Names and numbers that come again far behind their first mention.", _RECALL),
    Task(
        "accumulate",
        "accumulate",
        "Divergence of a cache that is built token by token: along a text, and along what either model writes.",
        _ANSWERS,
    ),
    Task("stored", "stored", "Divergence behind a prefix that was stored in chunks.", ("model", "plans", "device")),
    Task("distortion", "distortion", "Measured against predicted error of attention.", ("model", "plans", "device")),
    Task(
        "stability",
        "stability",
        "Plans of several Stats on the same text: how much a method owes to its calibration.",
        ("model", "budgets", "device"),
        runner="aatc_cli.studies.stability:stability",
    ),
    Task("speed", "speed", "Time of prefill and decode beside the model's own cache.", (*_CACHE, "profile-alone")),
    Task("memory", "memory", "Bytes that the cache holds and the most in use.", (*_CACHE, "profile-alone")),
    Task(
        "offline-speed",
        "offline_speed",
        "Time of collect and whiten, of a profile's geometry.",
        ("profile", "device"),
        kind="speed",
        runner="aatc_cli.studies.offline_speed:offline_speed",
    ),
    Task("needles", "needles", "Retrieval by context and depth, by generation: a heat map.", _ANSWERS),
    Task("ruler", "ruler", "RULER: retrieval, tracking, aggregation, questions; by generation.", _ANSWERS, "benchmark"),
    Task(
        "turns",
        "turns",
        "Several questions about one text, one after another: how likely the right answers are.",
        _FORCED,
        "benchmark",
    ),
    Task(
        "references",
        "references",
        "How likely the written answers of GSM8K, MATH-500 and LongBench are.",
        _FORCED,
        "benchmark",
    ),
    Task("gsm8k", "lm_eval", "GSM8K by lm-eval: school mathematics, by generation.", _ANSWERS, "benchmark"),
    Task("mmlu-pro", "lm_eval", "MMLU-Pro by lm-eval: multiple choice, by generation.", _ANSWERS, "benchmark"),
    Task("math-500", "lm_eval", "MATH-500 by lm-eval: competition problems, by generation.", _ANSWERS, "benchmark"),
    Task("longbench", "lm_eval", "LongBench by lm-eval: long documents, by generation.", _ANSWERS, "benchmark"),
)


def find_task(name: str) -> Task:
    """The task called ``name``; raises `UsageError` with the names that there are."""
    from aatc_cli.errors import UsageError

    for task in TASKS:
        if task.name == name:
            return task
    raise UsageError(f"there is no task {name!r}", f"the tasks are {', '.join(task.name for task in TASKS)}")
