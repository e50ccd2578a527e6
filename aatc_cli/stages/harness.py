"""eval --task gsm8k, mmlu-pro, math-500 or longbench: benchmarks of lm-eval with a compressed cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.run import Run
from aatc_cli.console import say, working
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.errors import AatcError
from aatc_cli.evals.benchmark import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.harness import Question, ask, question, require_harness
from aatc_cli.evals.harness_data import SUBTASKS, Source, Splits, chosen_subtasks
from aatc_cli.evals.longbench import METRICS
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.loading import ModelSource, Tokenizer, identify, load_config, load_model, load_tokenizer
from aatc_cli.stages.benchmark import Ledger
from aatc_cli.stages.ruler import session_of

Benchmark = Literal["gsm8k", "mmlu-pro", "math-500", "longbench"]
_METRICS = {"gsm8k": "flexible-extract", "mmlu-pro": "exact_match", "math-500": "math_verify"}


@dataclass(frozen=True)
class HarnessSettings:
    """What is asked: at most ``samples`` records of each subtask (0 is all), from the folder ``data`` or the hub."""

    benchmark: Benchmark
    samples: int
    subtasks: tuple[str, ...] = ()
    chat: bool = False
    data: str | None = None


@dataclass(frozen=True)
class _Job:
    """One subtask, ready to be asked."""

    subtask: str
    metric: str
    asked: Question
    splits: Splits
    prompts: str


def harness(
    run: Run,
    source: ModelSource,
    subjects: Sequence[Subject],
    settings: HarnessSettings,
    options: EvalOptions,
    batch: int = 1,
) -> list[BenchmarkResult]:
    """Ask every subject the same records and write a row per subtask as it comes.

    Rows of the same plan, model, records and settings are not run again. Raises `AatcError` when the packages of the
    ``bench`` extra or the records are not there.
    """
    names = chosen_subtasks(settings.benchmark, list(settings.subtasks))
    require_harness()
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    ledger = Ledger.open(run, settings.benchmark, SUBTASKS[settings.benchmark], identity, subjects, options)
    jobs, left_out = _jobs(names, settings, tokenizer)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    model: Any = None
    contenders: dict[str, Any] = {}
    for job in jobs:
        missing = ledger.missing(subjects, job.subtask, None, job.prompts)
        what = f"{settings.benchmark} {job.subtask}"
        for subject in subjects:
            if subject not in missing:
                say(f"eval: {what} of {subject.name} is there already, nothing to do")
                continue
            if model is None:
                with working(f"loading {source.name}"):
                    model = load_model(source, device=options.device, dtype=options.dtype)
            if subject.name not in contenders:
                contenders[subject.name] = session_of(subject, model)
            row = _row(job, model, tokenizer, contenders[subject.name], settings.chat, batch)
            ledger.add(subject, row, what)
    ledger.leave_out(subjects, left_out)
    return [ledger.results[subject.name] for subject in subjects]


def _jobs(names: list[str], settings: HarnessSettings, tokenizer: Tokenizer) -> tuple[list[_Job], dict[str, str]]:
    """The records of every subtask, and the reasons for those that are not there; raises when none is."""
    source = Source.of(settings.benchmark, settings.data)
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
        if settings.samples:
            splits = splits | {"test": splits["test"][: settings.samples]}
        asked = question(settings.benchmark, name, tokenizer.encode, tokenizer.raw.decode)
        known = {key: value for key, value in asked.config.items() if not callable(value)}
        prompts = digest_of([splits, known, settings.chat and asked.chat, version("lm-eval")])
        jobs.append(_Job(name, METRICS.get(name) or _METRICS[settings.benchmark], asked, splits, prompts))
    return jobs, left_out


def _row(job: _Job, model: Any, tokenizer: Tokenizer, contender: Any, chat: bool, batch: int) -> BenchmarkRow:
    say(f"eval: {job.subtask} of {contender.name}: {len(job.splits['test'])} samples")
    began = time.perf_counter()
    scores = ask(model, tokenizer.raw, cache_keyword(model), contender, job.asked, job.splits, chat, batch)
    mean, stderr = mean_and_stderr(scores)
    return BenchmarkRow(
        subtask=job.subtask,
        context=None,
        metric=job.metric,
        score=mean,
        stderr=stderr,
        samples=len(scores),
        scores=scores,
        prompts_sha256=job.prompts,
        seconds=time.perf_counter() - began,
    )
