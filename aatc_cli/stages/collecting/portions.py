"""A collection in portions: on to so many windows, and Stats of fewer of them kept on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aatc_cli.console import progress, say
from aatc_cli.errors import AatcError
from aatc_cli.stages.collecting.job import CollectJob
from aatc_cli.stages.collecting.passes import Timer, run_forward, run_gradients
from aatc_cli.stages.collecting.task import Task


def gather(task: Task, job: CollectJob, model: Any) -> tuple[Timer, tuple[int, int]]:
    """Run the model over this process's share of the windows, on from a checkpoint where there is one.

    The time it took, and how many windows and gradients of windows it was.
    """
    (start, stop), (fisher_start, fisher_stop) = map(
        task.processes.share, (task.settings.windows, task.settings.gradients)
    )
    if task.processes.count > 1:
        job.begin_at(start, fisher_start)
    elif any(job.resume(task.partial)):
        say(f"collect: continuing from window {job.windows} of {stop}, gradients from {job.gradients}")
    timer, before = Timer(), (job.windows, job.gradients)
    for windows, path in task.also.items():
        _keep(task, job, model, timer, windows, path)
    _run_to(task, job, model, timer, stop, fisher_stop)
    return timer, (job.windows - before[0], job.gradients - before[1])


def tell_cost(task: Task, timer: Timer, run: tuple[int, int]) -> None:
    """Say what was collected and what it took; ``run``: windows, and gradients of windows, of this process."""
    tokens, forward = task.settings.tokens(task.settings.windows), timer.total - timer.statistics
    windows, fisher = run
    say(
        f"collect: {tokens} tokens; forward {forward:.1f} s, statistics {timer.statistics:.1f} s "
        f"({100 * timer.statistics / max(forward, 1e-9):.0f} % of it) -> {task.target}"
    )
    if fisher and windows:
        ratio = (timer.fisher / fisher) / max(forward / windows, 1e-9)
        say(f"collect: gradients {timer.fisher:.1f} s; Fisher: {ratio:.1f} forward passes per window")


def _run_to(task: Task, job: CollectJob, model: Any, timer: Timer, windows: int, gradients: int) -> None:
    """Go on until there are the sums of so many windows, and the gradients of so many of them."""
    options, tokens = task.options, task.drawn.tokens
    with progress("collect", windows, job.windows) as ticker:
        run_forward(job, model, tokens[:windows], job.windows, options, timer, task.partial, ticker)
    if task.settings.fisher:
        with progress("collect gradients", gradients, job.gradients) as ticker:
            run_gradients(job, model, tokens[:gradients], job.gradients, options, timer, task.partial, ticker)


def _keep(task: Task, job: CollectJob, model: Any, timer: Timer, windows: int, path: Path) -> None:
    """Go on until ``windows`` are done, and keep their Stats at ``path``; nothing where that was done before."""
    gradients = min(windows, task.settings.fisher)
    if job.windows <= windows and job.gradients <= gradients:
        _run_to(task, job, model, timer, windows, gradients)
        job.write(path, windows, gradients, task.of_first(windows))
        say(f"collect: {windows} windows so far -> {path}")
    elif not path.exists():
        problem = f"{task.partial} is past the {windows} windows of {path.name}"
        raise AatcError(problem, f"leave out --also {windows}, or start over with --force")
