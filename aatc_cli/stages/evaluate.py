"""eval: run the model with compressed caches over held-out text; one JSON per task, recipe, budget and text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aatc_cli.artifacts.evaluation import Evaluation, Task, read_evaluation, write_evaluation
from aatc_cli.artifacts.manifest import ModelIdentity
from aatc_cli.artifacts.run import Run
from aatc_cli.console import progress, say, working
from aatc_cli.core.codec import TransformCodec
from aatc_cli.errors import UsageError
from aatc_cli.evals.distortion import measure_distortion
from aatc_cli.evals.forced.scores import Scores, score_windows
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.evals.subjects import EvalOptions, Subject, origin_of, placed_codecs, require_subjects, subject_codecs
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.limits import check_length, check_tokens
from aatc_cli.models.loading import ModelSource, identify, leading_device, load_config, load_model, load_tokenizer
from aatc_cli.text.windows import Windows, consecutive_windows


@dataclass(frozen=True)
class EvalSettings:
    """What is evaluated. ``first`` None means the task's default: 512 (or half a window) for kl, 0 for perplexity."""

    task: Task
    length: int = 1024
    limit: int | None = 4
    first: int | None = None
    queries: int = 8

    @property
    def first_position(self) -> int:
        """First scored position of a window."""
        if self.first is not None:
            return self.first
        return 0 if self.task == "perplexity" else min(512, self.length // 2)


def evaluate(
    run: Run,
    source: ModelSource,
    subjects: Sequence[Subject],
    texts: Sequence[str],
    settings: EvalSettings,
    options: EvalOptions,
) -> list[Evaluation]:
    """Evaluate every subject on the same windows of every text and write one file each.

    Those already there, made from the same plan, model and windows, are not run again. Raises `ArtifactError` when a
    plan is of another model, `AatcError` for text or windows that cannot be used.
    """
    _check(settings, subjects, options)
    options = replace(options, device=leading_device(options.device, spread=options.spread))
    with working(f"opening {source.name}"):
        config, tokenizer = load_config(source), load_tokenizer(source)
    identity = identify(source, config, tokenizer)
    check_length(settings.length, config)
    require_subjects(identity, subjects)
    frames = []
    for text in texts:
        windows = consecutive_windows(
            text, tokenizer.encode, length=settings.length, limit=settings.limit, bos=tokenizer.bos
        )
        check_tokens(windows.tokens, config)
        frames.append(_Frame(identity, settings, options, windows, tokenizer.bos is not None))
    model: Any = None
    results: list[Evaluation] = []
    for frame in frames:
        found = {subject.name: frame.existing(run, subject) for subject in subjects}
        missing = [subject for subject in subjects if found[subject.name] is None]
        if missing and model is None:
            with working(f"loading {source.name}"):
                placed = "auto" if options.spread else None
                model = load_model(source, device=options.device, dtype=options.dtype, device_map=placed)
        results += _fill(run, frame, model, subjects, missing, found)
    return results


def _fill(
    run: Run,
    frame: _Frame,
    model: Any,
    subjects: Sequence[Subject],
    missing: Sequence[Subject],
    found: dict[str, Evaluation | None],
) -> list[Evaluation]:
    """Run what is missing of one text; the evaluations of all subjects in their order."""
    task, text = frame.settings.task, frame.windows.records[0].name
    for subject in subjects:
        if subject not in missing:
            say(f"eval: {task} of {subject.name} on {text} is there already, nothing to do")
    if missing:
        runner = _run_distortion if task == "distortion" else _run_scores
        for subject, evaluation in zip(missing, runner(model, missing, frame), strict=True):
            say(f"eval: {task} of {subject.name} on {text} -> {write_evaluation(run.evals, evaluation)}")
            found[subject.name] = evaluation
    return [evaluation for evaluation in found.values() if evaluation is not None]


def _check(settings: EvalSettings, subjects: Sequence[Subject], options: EvalOptions) -> None:
    if not subjects:
        raise UsageError("nothing to evaluate", "name plans by --recipe and --budget, or by --plan")
    if not 0 <= settings.first_position < settings.length - 1:
        raise UsageError(
            f"--first {settings.first_position} leaves no position to score in windows of {settings.length}",
            "use a smaller --first or a larger --length",
        )
    if settings.task == "distortion":
        if options.spread:
            raise UsageError("distortion is measured on one device", "leave out --device-map, or use --task kl")
        for subject in subjects:
            if subject.plan is None:
                raise UsageError(f"{subject.name} has no quantizer to predict", "evaluate distortion of a plan")
            if subject.plan.classes.count > 1 or not subject.recipe.window.exact:
                what = "tokens at several rates" if subject.plan.classes.count > 1 else "its window in 8 bits"
                problem = f"the noise of {subject.name}, which keeps {what}, is not predicted"
                raise UsageError(problem, "use --task kl or perplexity")
            if not subject.recipe.packed:
                problem = f"the noise of {subject.recipe.quantizer}, the quantizer of {subject.name}, is not predicted"
                raise UsageError(problem, "use --task kl or perplexity")


@dataclass(frozen=True)
class _Frame:
    """What all subjects of one call share, and how it becomes an Evaluation."""

    identity: ModelIdentity
    settings: EvalSettings
    options: EvalOptions
    windows: Windows
    bos: bool

    @property
    def queries(self) -> int | None:
        """Query positions measured per window by the distortion task."""
        s = self.settings
        return min(s.queries, s.length - s.first_position) if s.task == "distortion" else None

    def evaluation(
        self, subject: Subject, seconds: float, measured: dict[str, Any], shares: list[list[float]] | None = None
    ) -> Evaluation:
        """The record of one subject with what was measured; sizes at the ``shares`` of token classes, if there are."""
        s, tokens, window = self.settings, self.windows.tokens, subject.recipe.window
        origin = origin_of(subject, self.identity, self.options)
        layout = subject.plan.layout if subject.plan else None
        if layout is not None and shares is not None:
            layout = layout.with_shares(shares)
            means = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
            origin, measured = (
                origin | {"bits": layout.mean_bits, "bits_packed": layout.bits_packed},
                measured | {"class_shares": means},
            )
        scored = self.queries if self.queries is not None else s.length - 1 - s.first_position
        return Evaluation(
            **origin,
            task=s.task,
            seconds=seconds,
            bits_at_context=layout.bits_at(s.length) if layout else 16.0,
            ratio=layout.ratio(s.length) if layout else 1.0,
            context=s.length,
            text=self.windows.records[0].name,
            text_sha256=self.windows.records[0].sha256,
            windows=tokens.shape[0],
            length=s.length,
            stride=s.length - int(self.bos),
            first_position=s.first_position,
            tokens_scored=tokens.shape[0] * scored,
            queries=self.queries,
            sinks=window.sinks,
            recent=window.recent,
            flush=window.flush,
            **measured,
        )

    def existing(self, run: Run, subject: Subject) -> Evaluation | None:
        """The evaluation already on disk, if it is of exactly this plan, model, text and windows."""
        if self.options.force:
            return None
        draft = self.evaluation(subject, 0.0, {})
        path = run.evals / draft.file_name
        if not path.is_file():
            return None
        found = read_evaluation(path)
        keys = (
            "plan",
            "model_fingerprint",
            "text_sha256",
            "windows",
            "stride",
            "sinks",
            "recent",
            "flush",
            "queries",
            "dtype",
        )
        return found if all(getattr(found, key) == getattr(draft, key) for key in keys) else None


def _run_scores(model: Any, subjects: Sequence[Subject], frame: _Frame) -> list[Evaluation]:
    sites = attention_sites(model)
    methods = [
        Method(s.name, placed_codecs(s, sites, frame.options), s.recipe.window, s.recipe.coordinates) for s in subjects
    ]
    total = frame.windows.tokens.shape[0] * (1 + len(methods))
    with progress(f"eval {frame.settings.task}", total) as ticker:
        scores = score_windows(
            model,
            sites,
            methods,
            frame.windows.tokens,
            frame.settings.first_position,
            lambda name: ticker.advance(text=f"eval {frame.settings.task}: {name}"),
        )
    return [
        frame.evaluation(subject, score.seconds, _measured(frame.settings.task, score), score.class_shares())
        for subject, score in zip(subjects, scores, strict=True)
    ]


def _measured(task: Task, scores: Scores) -> dict[str, Any]:
    nll = scores.nll_summary()
    if task == "kl":
        return scores.kl_summary() | nll
    mean, stderr, reference = nll["nll"], nll["nll_stderr"], nll["nll_reference"]
    assert mean is not None
    assert reference is not None
    perplexity = float(torch.tensor(mean, dtype=torch.float64).exp())
    return nll | {
        "perplexity": perplexity,
        # delta method: the derivative of exp is exp itself
        "perplexity_stderr": None if stderr is None else perplexity * stderr,
        "perplexity_reference": float(torch.tensor(reference, dtype=torch.float64).exp()),
    }


def _run_distortion(model: Any, subjects: Sequence[Subject], frame: _Frame) -> list[Evaluation]:
    sites, tokens = attention_sites(model), frame.windows.tokens
    first, last = frame.settings.first_position, frame.settings.length - 1
    count = frame.queries or 1
    positions = [first + (last - first) * (i + 1) // count for i in range(count)]
    results = []
    with progress("eval distortion", len(subjects) * tokens.shape[0] * len(sites)) as ticker:
        for subject in subjects:
            assert subject.plan is not None
            began = time.perf_counter()
            codecs: list[dict[Any, TransformCodec]] = subject_codecs(subject, len(sites), frame.options.device)
            rows = measure_distortion(model, sites, codecs, subject.recipe.window, tokens, positions, ticker.advance)
            results.append(frame.evaluation(subject, time.perf_counter() - began, {"distortion": rows}))
    return results
