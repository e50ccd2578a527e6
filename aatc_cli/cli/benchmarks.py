"""The benchmark tasks of the eval command: options to settings, stage, print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aatc_cli.artifacts.run import Run
    from aatc_cli.evals.subjects import EvalOptions, Subject
    from aatc_cli.models.loading import ModelSource
    from aatc_cli.stages.harness import Benchmark

# samples of a subtask without --limit: enough to see a fall, few enough for a CPU
_SAMPLES = 20


def run_ruler(
    run: Run,
    source: ModelSource,
    subjects: list[Subject],
    options: EvalOptions,
    batch: int,
    json: bool,
    *,
    contexts: list[int] | None,
    limit: int | None,
    subtasks: list[str] | None,
    seed: int,
    chat: bool,
    data: str | None,
    texts: list[str],
) -> None:
    """``--task ruler``: needles, chains, counts and questions at every --context."""
    from aatc_cli.cli.printing import print_benchmarks
    from aatc_cli.stages.ruler import RulerSettings, ruler

    settings = RulerSettings(
        contexts=tuple(contexts or [1024]),
        samples=_SAMPLES if limit is None else limit,
        subtasks=tuple(subtasks or ()),
        seed=seed,
        chat=chat,
        data=data,
        texts=tuple(texts),
    )
    print_benchmarks(ruler(run, source, subjects, settings, options, batch), json)


def run_harness(
    run: Run,
    source: ModelSource,
    subjects: list[Subject],
    options: EvalOptions,
    batch: int,
    json: bool,
    *,
    benchmark: Benchmark,
    limit: int | None,
    subtasks: list[str] | None,
    chat: bool,
    data: str | None,
) -> None:
    """``--task gsm8k``, ``mmlu-pro``, ``math-500`` and ``longbench``, by lm-eval."""
    from aatc_cli.cli.printing import print_benchmarks
    from aatc_cli.stages.harness import HarnessSettings, harness

    samples = _SAMPLES if limit is None else limit
    settings = HarnessSettings(benchmark, samples, tuple(subtasks or ()), chat, data)
    print_benchmarks(harness(run, source, subjects, settings, options, batch), json)
