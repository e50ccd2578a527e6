"""GSM8K, MMLU-Pro, MATH-500 and LongBench: records put to the model by lm-eval, with a subject's cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.console import say
from aatc_cli.errors import AatcError
from aatc_cli.evals.answers.ledger import Ledger, score_row
from aatc_cli.evals.answers.result import BenchmarkRow
from aatc_cli.evals.caches import session_of
from aatc_cli.evals.lm_eval.asking import Question, ask, question, require_harness
from aatc_cli.evals.lm_eval.longbench import METRICS
from aatc_cli.evals.lm_eval.records import SUBTASKS, Source, Splits, chosen_subtasks
from aatc_cli.evals.lm_eval.result import Result
from aatc_cli.evals.lm_eval.settings import Settings
from aatc_cli.evals.opened import Opened
from aatc_cli.models.compressed import cache_keyword

_METRICS = {"gsm8k": "flexible-extract", "mmlu-pro": "exact_match", "math-500": "math_verify"}


@dataclass(frozen=True)
class _Job:
    """One subtask, ready to be asked."""

    subtask: str
    metric: str
    asked: Question
    splits: Splits
    prompts: str


def measure(opened: Opened, settings: Settings) -> list[Result]:
    """Ask every subject the same records and write a row per subtask as it comes.

    Rows of the same plan, model, records and settings are not run again. Raises `AatcError` when the packages of the
    ``bench`` extra or the records are not there.
    """
    names = chosen_subtasks(opened.task, list(settings.subtask))
    require_harness()
    ledger = Ledger.open(
        opened,
        SUBTASKS[opened.task],
        samples=settings.limit,
        chat=settings.chat and opened.tokenizer.chat_digest,
        lm_eval=version("lm-eval"),
    )
    jobs, left_out = _jobs(names, opened, settings)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    caches: dict[str, Any] = {}
    for job in jobs:
        missing = ledger.missing(opened.subjects, job.subtask, None, job.prompts)
        what = f"{opened.task} {job.subtask}"
        for subject in opened.subjects:
            if subject not in missing:
                say(f"eval: {what} of {subject.name} is there already, nothing to do")
                continue
            if subject.name not in caches:
                caches[subject.name] = session_of(subject, opened.model(), opened.options)
            ledger.add(subject, _row(job, opened, caches[subject.name], chat=settings.chat), what)
    ledger.leave_out(opened.subjects, left_out)
    return [ledger.results[subject.name] for subject in opened.subjects]


def _jobs(names: list[str], opened: Opened, settings: Settings) -> tuple[list[_Job], dict[str, str]]:
    """The records of every subtask, and the reasons for those that are not there; raises when none is."""
    source, tokenizer = Source.of(opened.task, settings.data), opened.tokenizer
    jobs: list[_Job] = []
    left_out: dict[str, str] = {}
    for name in names:
        try:
            splits = source.read(name)
        except AatcError as error:
            left_out[name] = f"{error.message}; {error.hint}"
            if len(left_out) == len(names):
                raise
            continue
        if settings.limit:
            splits = splits | {"test": splits["test"][: settings.limit]}
        asked = question(opened.task, name, tokenizer.encode, tokenizer.raw.decode)
        known = {key: value for key, value in asked.config.items() if not callable(value)}
        prompts = digest_of([splits, known, settings.chat and asked.chat, version("lm-eval")])
        jobs.append(_Job(name, METRICS.get(name) or _METRICS[opened.task], asked, splits, prompts))
    return jobs, left_out


def _row(job: _Job, opened: Opened, cache: Any, *, chat: bool) -> BenchmarkRow:
    say(f"eval: {job.subtask} of {cache.name}: {len(job.splits['test'])} samples")
    began, model, batch = time.perf_counter(), opened.model(), opened.options.batch
    scores = ask(model, opened.tokenizer.raw, cache_keyword(model), cache, job.asked, job.splits, chat, batch)
    return score_row((job.subtask, None, job.metric), scores, job.prompts, time.perf_counter() - began)
