"""Studies as data: which methods at which budgets answer which tasks. A TOML file each, read strictly."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aatc_cli.artifacts.study import StudyCell
from aatc_cli.config import MAX_BITS, Settings
from aatc_cli.errors import UsageError
from aatc_cli.evals.accumulate.settings import WAYS, Way
from aatc_cli.evals.windows.settings import TEXT
from aatc_cli.profiles import load_named

WindowTask = Literal["kl", "perplexity", "recall", "accumulate"]
ForcedTask = Literal["turns", "references"]
HarnessTask = Literal["gsm8k", "mmlu-pro", "math-500", "longbench"]
_Bits = Annotated[float, Field(gt=0, le=MAX_BITS)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# fields that only some tasks read
_READ_BY = {
    "length": ("kl", "perplexity", "recall", "references"),
    "first": ("kl", "perplexity"),
    "prompt": ("kl", "accumulate"),
    "tokens": ("accumulate",),
    "ways": ("accumulate",),
    "cache": ("accumulate",),
    "at_once": ("accumulate",),
    "texts": ("kl", "perplexity", "recall", "accumulate", "ruler", "turns", "needles"),
    "given_too": ("kl", "perplexity", "recall", "accumulate"),
    "contexts": ("ruler", "turns", "needles"),
    "depths": ("needles",),
    "mode": ("ruler", "needles"),
    "seed": ("ruler", "turns", "needles", "accumulate"),
    "subtasks": ("ruler", "references", "gsm8k", "mmlu-pro", "math-500", "longbench"),
    "chat": ("ruler", "needles", "gsm8k", "mmlu-pro", "math-500", "longbench"),
}


class StudyChoices(Settings):
    """What a call changes of a study: texts where a task names none, and limits, lengths and methods of all tasks."""

    recipe: tuple[str, ...] = Field((), strict=False, description="Only these of the study's methods; several allowed.")
    row: tuple[str, ...] = Field(
        (), strict=False, description="Only these rows of them (paper@2, 'paper*', ...), globs allowed."
    )
    task: tuple[str, ...] = Field(
        (), strict=False, description="Only these of the study's tasks (kl, 'ruler forced', ...), globs allowed."
    )
    plans: bool = Field(False, description="Make the plans that the chosen rows and tasks need, and measure nothing.")
    text: tuple[str, ...] = Field(
        (TEXT,), strict=False, description="Held-out text of tasks that name none; several allowed."
    )
    length: int | None = Field(None, ge=2, description="Tokens per window, of all tasks that have windows.")
    limit: int | None = Field(None, ge=0, description="Windows per text or samples per subtask, of all tasks.")
    tokens: int | None = Field(None, ge=8, description="Tokens decoded by accumulate.")
    context: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), strict=False, description="Contexts of RULER; several allowed."
    )
    data: str | None = Field(None, description="Folder with a folder of files for each benchmark, or hub.")

    def takes(self, row: str) -> bool:
        """Whether the row of this name is among those that are chosen: any if none are named."""
        return not self.row or any(fnmatchcase(row, pattern) for pattern in self.row)


class StudyMethod(Settings):
    """One recipe at its budgets. A recipe that allocates nothing (fp16) has none."""

    recipe: str = Field(description="a recipe's name or the path of a .toml file")
    budgets: tuple[_Bits, ...] = Field((), strict=False, description="bits per channel, as for allocate --budget")
    packed: tuple[_Bits, ...] = Field(
        (), strict=False, description="bits that a number of a packed token takes with all that goes with it"
    )
    label: str | None = Field(None, description="what the report calls it; the recipe's name unless given")
    stats: str | None = Field(
        None, pattern=_NAME, description="Stats of the run to calibrate on alone, by name; the run's own unless given"
    )


class StudyTask(Settings):
    """One task, asked of every method, or of ``only`` some."""

    task: WindowTask | ForcedTask | Literal["ruler", "needles"] | HarnessTask
    only: tuple[str, ...] = Field(
        (), strict=False, description="names of rows that are asked, as paper@2 or fp16, globs allowed; all if none"
    )
    texts: tuple[str, ...] = Field((), strict=False, description="held-out texts; those of --text unless given")
    given_too: bool = Field(False, description="whether those of --text come behind texts that are named here")
    length: int = Field(2048, ge=2, description="tokens per window (kl, perplexity, recall) or prompt (references)")
    first: int | None = Field(None, ge=0, description="first scored position (kl, perplexity); the task's own if none")
    prompt: int | None = Field(None, ge=1, description="tokens of a window that are a prompt (kl, accumulate)")
    tokens: int = Field(512, ge=8, description="tokens decoded behind the prompt (accumulate)")
    ways: tuple[Way, ...] = Field(WAYS, strict=False, description="who writes the tokens that are decoded (accumulate)")
    cache: Literal["auto", "packed", "fused", "simulated"] = Field(
        "auto", description="how the cache is held (accumulate)"
    )
    at_once: bool = Field(False, description="read tokens that are given in one pass (accumulate)")
    contexts: tuple[int, ...] = Field(
        (), strict=False, description="tokens of prompt and answer (ruler, turns, needles)"
    )
    depths: tuple[int, ...] = Field((), strict=False, description="places of a needle in percent (needles)")
    mode: Literal["generate", "forced"] = Field("generate", description="how answers are had (ruler, needles)")
    subtasks: tuple[str, ...] = Field((), strict=False, description="parts of a benchmark, globs allowed; all if none")
    limit: int = Field(4, ge=0, description="windows per text or samples per subtask; 0 is all")
    chat: bool = Field(False, description="ask in the model's chat template (benchmarks)")
    seed: int = Field(0, ge=0, description="seed of prompts (ruler, turns) and of what is written (accumulate)")

    def asks(self, row: str) -> bool:
        """Whether the row of this name is asked."""
        return not self.only or any(fnmatchcase(row, pattern) for pattern in self.only)

    @property
    def name(self) -> str:
        """What it is chosen by: the task, with the prompt or mode that tells it from others of its kind."""
        mode = None if self.mode == "generate" else self.mode
        return StudyCell(row="", task=self.task, prompt=self.prompt, mode=mode).task_name

    @model_validator(mode="after")
    def _fields_are_read(self) -> Self:
        for field, tasks in _READ_BY.items():
            if self.task not in tasks and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} is not read by {self.task}, only by {', '.join(tasks)}")
        if self.task in ("ruler", "turns", "needles") and not self.contexts:
            raise ValueError(f"{self.task} needs contexts")
        return self


class Study(Settings):
    """Every method through every task."""

    name: str = Field(pattern=_NAME, description="part of a file name: no space, no slash")
    summary: str
    methods: tuple[StudyMethod, ...] = Field(min_length=1, strict=False)
    tasks: tuple[StudyTask, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _methods_differ(self) -> Self:
        places = [(method.recipe, method.stats) for method in self.methods]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice:
            raise ValueError(f"recipe {twice[0]} is listed twice with the same stats; give it all budgets in one entry")
        return self

    @model_validator(mode="after")
    def _tasks_differ(self) -> Self:
        names = [task.name for task in self.tasks]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"task {twice} is listed twice; give it all texts or subtasks in one entry")
        return self


def chosen_tasks(study: Study, wanted: Sequence[str]) -> list[StudyTask]:
    """Tasks of a study whose names match any of the globs, all without any; raises `UsageError` for one in vain."""
    for pattern in wanted:
        if not any(fnmatchcase(task.name, pattern) for task in study.tasks):
            known = ", ".join(dict.fromkeys(task.name for task in study.tasks))
            raise UsageError(f"the study {study.name} has no task {pattern!r}", f"it has {known}")
    return [t for t in study.tasks if not wanted or any(fnmatchcase(t.name, pattern) for pattern in wanted)]


def load_study(name: str) -> Study:
    """Read the study ``name`` (a packaged name or a path to a TOML file); raises `AatcError`."""
    return load_named("studies", name, Study)
