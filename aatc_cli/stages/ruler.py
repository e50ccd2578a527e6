"""eval --task ruler: retrieval, tracking, aggregation and questions at chosen context lengths, by generation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aatc_cli.artifacts.manifest import digest_of
from aatc_cli.artifacts.run import Run
from aatc_cli.console import progress, say, working
from aatc_cli.core.metrics import mean_and_stderr
from aatc_cli.errors import AatcError
from aatc_cli.evals.benchmark import BenchmarkResult, BenchmarkRow
from aatc_cli.evals.generation import Batch, generate
from aatc_cli.evals.subjects import EvalOptions, Subject
from aatc_cli.models.compressed import cache_keyword
from aatc_cli.models.generation import chat_tokens, end_tokens, plain_tokens
from aatc_cli.models.limits import check_length
from aatc_cli.models.loading import ModelSource, Tokenizer, identify, load_config, load_model, load_tokenizer
from aatc_cli.runtime.attach import plain, prepare
from aatc_cli.runtime.prefill import shared_prefill
from aatc_cli.runtime.session import Session
from aatc_cli.stages.benchmark import Ledger
from aatc_cli.text.ruler.collections import open_collections
from aatc_cli.text.ruler.prompt import Metric, Prompt, Sample, make_samples
from aatc_cli.text.ruler.score import score
from aatc_cli.text.ruler.tasks import SAMPLES, TASKS, Material, chosen_tasks, make_task
from aatc_cli.text.sources import documents, parse_source


@dataclass(frozen=True)
class RulerSettings:
    """What is asked. ``samples`` 0 is RULER's own number; ``subtasks`` are globs, none of them all tasks.

    ``data`` is the folder of the SQuAD and HotpotQA files, "hub", or None to leave qa_1 and qa_2 out.
    """

    contexts: tuple[int, ...]
    samples: int
    subtasks: tuple[str, ...] = ()
    seed: int = 0
    chat: bool = False
    data: str | None = None
    texts: tuple[str, ...] = ("builtin:python-docs-test",)


@dataclass(frozen=True)
class _Job:
    """One subtask at one context, ready to be asked."""

    subtask: str
    context: int
    metric: Metric
    room: int
    samples: list[Sample]
    prompts: str


def ruler(
    run: Run,
    source: ModelSource,
    subjects: Sequence[Subject],
    settings: RulerSettings,
    options: EvalOptions,
    batch: int = 1,
) -> list[BenchmarkResult]:
    """Ask every subject the same prompts, ``batch`` at a time, and write a row per subtask and context as it comes.

    Rows of the same plan, model and prompts are not run again. Raises `AatcError` for a context that the model does
    not have, `UsageError` for an unknown subtask.
    """
    names = chosen_tasks(settings.subtasks)
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    for context in settings.contexts:
        check_length(context, config)
    ledger = Ledger.open(run, "ruler", TASKS, identify(source, config, tokenizer), subjects, options)
    jobs, left_out = _jobs(names, settings, tokenizer)
    for name, reason in left_out.items():
        say(f"eval: {name} is left out: {reason}")
    if not jobs:
        raise AatcError(f"no RULER task can be asked: {next(iter(left_out.values()))}", "give a larger --context")
    bench: _Bench | None = None
    for job in jobs:
        missing = ledger.missing(subjects, job.subtask, job.context, job.prompts)
        what = f"ruler {job.subtask} at {job.context}"
        for subject in subjects:
            if subject not in missing:
                say(f"eval: {what} of {subject.name} is there already, nothing to do")
        if missing:
            bench = bench or _Bench.open(source, tokenizer, options)
            for subject, row in zip(missing, bench.rows(job, missing, batch), strict=True):
                ledger.add(subject, row, what)
    ledger.leave_out(subjects, left_out)
    return [ledger.results[subject.name] for subject in subjects]


def _jobs(names: list[str], settings: RulerSettings, tokenizer: Tokenizer) -> tuple[list[_Job], dict[str, str]]:
    """The prompts of every subtask and context, and the reasons for those that cannot be made."""

    def encode(prompt: Prompt) -> list[int]:
        if settings.chat:
            return chat_tokens(tokenizer, prompt.text, prompt.prefix)
        return plain_tokens(tokenizer, prompt.text + prompt.prefix)

    text = "\n\n".join(document for spec in settings.texts for document in documents(parse_source(spec)))
    material = Material(text, *open_collections(settings.data, {"qa_1", "qa_2"} & set(names)))
    jobs: list[_Job] = []
    left_out: dict[str, str] = {}
    for context in settings.contexts:
        for name in names:
            try:
                task = make_task(name, context, material, encode)
                samples = make_samples(task, context, settings.samples or SAMPLES, settings.seed, encode)
            except AatcError as error:
                left_out[f"{name} at {context}"] = f"{error.message}; {error.hint}"
                continue
            prompts = digest_of([task.room, task.metric, [[s.tokens, s.prompt.answers] for s in samples]])
            jobs.append(_Job(name, context, task.metric, task.room, samples, prompts))
    return jobs, left_out


@dataclass
class _Bench:
    """The loaded model and the caches that were made ready for it."""

    model: Any
    tokenizer: Tokenizer
    device: str
    contenders: dict[str, Session] = field(default_factory=dict)

    @classmethod
    def open(cls, source: ModelSource, tokenizer: Tokenizer, options: EvalOptions) -> _Bench:
        """Load the model."""
        with working(f"loading {source.name}"):
            return cls(load_model(source, device=options.device, dtype=options.dtype), tokenizer, options.device)

    def rows(self, job: _Job, subjects: Sequence[Subject], batch: int) -> list[BenchmarkRow]:
        """The row of every subject."""
        contenders = [self._contender(subject) for subject in subjects]
        # prompts of equal length share a store in the packed cache, so neighbours in length go together
        order = sorted(range(len(job.samples)), key=lambda index: len(job.samples[index].tokens))
        scores: list[list[float]] = [[] for _ in subjects]
        began = time.perf_counter()
        with progress(f"eval ruler {job.subtask} at {job.context}", len(order)) as ticker:
            for start in range(0, len(order), batch):
                part = [job.samples[index] for index in order[start : start + batch]]
                for place, found in enumerate(self._answers(job, part, contenders)):
                    scores[place] += found
                ticker.advance(len(part))
        seconds = (time.perf_counter() - began) / len(subjects)
        return [
            BenchmarkRow(
                subtask=job.subtask,
                context=job.context,
                metric=job.metric,
                score=mean,
                stderr=stderr,
                samples=len(values),
                scores=values,
                prompts_sha256=job.prompts,
                seconds=seconds,
            )
            for values in scores
            for mean, stderr in [mean_and_stderr(values)]
        ]

    def _answers(self, job: _Job, samples: list[Sample], contenders: list[Session]) -> list[list[float]]:
        """Scores of these samples by contender."""

        def value(row: int, tokens: list[int]) -> float:
            text = self.tokenizer.raw.decode(tokens, skip_special_tokens=True)
            return score(text, samples[row].prompt.answers, job.metric)

        texts = generate(
            self.model,
            cache_keyword(self.model),
            Batch.of([s.tokens for s in samples], torch.device(self.device)),
            contenders,
            lambda b: shared_prefill(contenders, b.ids, b.mask, b.positions),
            job.room,
            # the score never falls as the text grows, so a full one cannot change any more
            end_tokens(self.model),
            lambda row, tokens: value(row, tokens) == 1.0,
        )
        return [[value(row, tokens) for row, tokens in enumerate(found)] for found in texts]

    def _contender(self, subject: Subject) -> Session:
        if subject.name not in self.contenders:
            self.contenders[subject.name] = session_of(subject, self.model)
        return self.contenders[subject.name]


def session_of(subject: Subject, model: Any) -> Session:
    """The session of a subject: the model's own cache without a plan, with it the one that the plan has."""
    return plain(model, subject.name) if subject.plan is None else prepare(model, subject.plan)
